// Compares the optimizers' CUDA kernels with those of the CPU, bit for bit: every format, rule, dtype and
// master, in batches of tensors of many sizes, at shifted addresses, with gradients that are not finite.
#include <gtest/gtest.h>

#include <list>
#include <string>

#include "device/device_bytes.h"
#include "device/played_grid.h"
#include "kernels/cuda/optim_step.h"
#include "kernels/optim_matrices.h"
#include "kernels/optim_tensors.h"

namespace reef::kernels {
namespace {

constexpr const cuda::OptimCudaKernels& (*kOnDevice[])() = {cuda::optim_float32,
                                                            cuda::optim_bfloat16,
                                                            cuda::optim_int8,
                                                            cuda::optim_int4,
                                                            cuda::optim_companded8,
                                                            cuda::optim_int8_compensated,
                                                            cuda::optim_int4_compensated,
                                                            cuda::optim_companded8_compensated};
static_assert(std::size(kOnDevice) == std::size(kFormats));

/// A copy of a tensor in the played device's memory.
struct OnDevice {
  DeviceBytes parameter, gradient, master;
  std::list<DeviceBytes> states, new_scales;
  OptimTensor plain;

  OnDevice(const Tensor& tensor, std::size_t shift)
      : parameter(tensor.parameter, shift * bytes_each(tensor.plain.parameter_dtype)),
        gradient(tensor.gradient, shift * bytes_each(tensor.plain.gradient_dtype)),
        master(tensor.master, shift * (tensor.plain.master_kind == OptimMaster::kFloat32 ? 4 : 1)),
        plain(tensor.plain) {
    plain.parameter = parameter.as<std::byte>();
    plain.gradient = gradient.as<std::byte>();
    plain.master = tensor.master.empty() ? nullptr : master.as<std::byte>();
    for (int i = 0; i < kMostStates; ++i) {
      auto* const codes = states.emplace_back(tensor.codes[i]).as<std::byte>();
      plain.states[i] = {codes, states.emplace_back(tensor.scales[i]).as<std::byte>()};
    }
  }
  /// Copies a matrix, whose unsigned states have scales of rows and columns, and memory for new scales.
  OnDevice(Matrix& matrix, std::size_t shift) : OnDevice(matrix.tensor, shift) {
    for (std::size_t i = 0; i < matrix.signs.size(); ++i) {
      if (matrix.signs[i]) continue;
      plain.states[i].matrix = matrix.shape;
      plain.states[i].new_scales =
          new_scales.emplace_back(std::vector<float>(matrix.new_scales[i].size())).as<float>();
    }
  }
  static std::size_t bytes_each(OptimDtype dtype) {
    return static_cast<std::size_t>(optim_dtype_bytes(dtype));
  }

  /// Expects the values of `tensor`, and unchanged bytes around all buffers.
  void expect_is(const Tensor& tensor, const std::string& where) {
    ASSERT_EQ(parameter.copy<std::byte>(), tensor.parameter) << where;
    ASSERT_EQ(gradient.copy<std::byte>(), tensor.gradient) << where;
    ASSERT_EQ(master.copy<std::byte>(), tensor.master) << where;
    auto state = states.begin();
    for (int i = 0; i < kMostStates; ++i) {
      ASSERT_EQ((state++)->copy<std::byte>(), tensor.codes[i]) << where << ", state " << i;
      ASSERT_EQ((state++)->copy<std::byte>(), tensor.scales[i]) << where << ", state " << i;
    }
    ASSERT_TRUE(parameter.is_whole_around() && gradient.is_whole_around() && master.is_whole_around())
        << where;
    for (const auto* const memory : {&states, &new_scales}) {
      for (const DeviceBytes& each : *memory) ASSERT_TRUE(each.is_whole_around()) << where;
    }
  }
};

/// The batch of tensors that one launch steps.
struct Batch {
  std::list<OnDevice> tensors;
  DeviceBytes entries{std::vector<cuda::OptimEntry>()}, counters{std::vector<unsigned long long>()};
  cuda::OptimBatch plain;

  template <class Given>  // Tensor or Matrix
  Batch(std::vector<Given>& given, Random& random) {
    counters = DeviceBytes(std::vector<unsigned long long>(given.size()));
    std::vector<cuda::OptimEntry> all;
    for (Given& each : given) {
      const OptimTensor& on_device = tensors.emplace_back(each, random() % 9).plain;
      all.push_back({on_device, plain.pieces, counters.as<unsigned long long>() + all.size()});
      plain.pieces += (tiles_of(on_device.elements) + cuda::kPieceTiles - 1) / cuda::kPieceTiles;
    }
    entries = DeviceBytes(all);
    plain.entries = entries.as<cuda::OptimEntry>();
    plain.count = static_cast<int>(all.size());
  }
};

class EveryDeviceKernel : public EveryKernel {
 protected:
  const cuda::OptimCudaKernels& on_device() const { return kOnDevice[std::get<1>(GetParam())](); }
};

TEST_P(EveryDeviceKernel, GivesTheBitsOfTheCpu) {
  Random random(static_cast<std::uint64_t>(29 * std::get<0>(GetParam()) + std::get<1>(GetParam())));
  for (std::size_t row = 0; row < 2 * std::size(kEveryChoice); ++row) {
    played::seed(random());
    std::vector<Tensor> expected;
    for (std::size_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      const std::int64_t pieces = random() % 6 == 0 ? 1 + static_cast<std::int64_t>(random() % 4) : 0;
      const std::int64_t elements = pieces * cuda::kPieceTiles * kTileElements + any_size(random);
      Tensor& made = expected.emplace_back(
          random_tensor(random, format(), elements, kEveryChoice[row % std::size(kEveryChoice)]));
      warm(made, rule(), format(), random, static_cast<int>(random() % 3));
      made.plain.constants = random_constants(random);
      if (random() % 5 == 0) put_nonfinite(made, random);
    }
    Batch batch(expected, random);
    const std::string where = "row " + std::to_string(row);
    if (on_device().measure[r()] != nullptr) {
      DeviceBytes squares(std::vector<OptimSquares>(static_cast<std::size_t>(batch.plain.pieces)));
      on_device().measure[r()](batch.plain, squares.as<OptimSquares>(), nullptr);
      ASSERT_TRUE(squares.is_whole_around());
      const std::vector<OptimSquares> found = squares.copy<OptimSquares>();
      std::size_t piece = 0;
      for (Tensor& tensor : expected) {
        for (std::int64_t first = 0; first < tensor.tiles(); first += cuda::kPieceTiles, ++piece) {
          const OptimSquares sum = portable().measure[r()][f()](
              tensor.view(), first, std::min(tensor.tiles(), first + cuda::kPieceTiles));
          ASSERT_NEAR(found[piece].parameter, sum.parameter, 1e-6 * sum.parameter) << where;
          ASSERT_NEAR(found[piece].measured, sum.measured, 1e-6 * sum.measured) << where;
        }
      }
    }
    on_device().step[r()](batch.plain, nullptr);
    auto tensor = batch.tensors.begin();
    const std::vector<unsigned long long> counted = batch.counters.copy<unsigned long long>();
    for (std::size_t i = 0; i < expected.size(); ++i, ++tensor) {
      Tensor& cpu = expected[i];
      const std::int64_t nonfinite = portable().step[r()][f()](cpu.view(), 0, cpu.tiles());
      ASSERT_EQ(static_cast<std::int64_t>(counted[i]), nonfinite) << where;
      tensor->expect_is(cpu, where + ", tensor " + std::to_string(i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryDeviceKernel,
                         testing::Combine(testing::Range(0, kOptimRules),
                                          testing::Range(0, static_cast<int>(std::size(kFormats)))));

// Encoding gives the CPU's codes and scales, and decoding gives the CPU's values.
TEST(OptimStepDevice, EncodesAndDecodesAsTheCpu) {
  Random random(3);
  for (std::size_t number = 0; number < std::size(kFormats); ++number) {
    const cuda::OptimCudaKernels& on_device = kOnDevice[number]();
    for (const bool is_signed : {false, true}) {
      const Format format{kFormats[number], is_signed};
      for (int row = 0; row < 40; ++row) {
        std::vector<float> given = values(random, any_size(random), 3);
        if (!is_signed)
          for (float& value : given) value = std::abs(value);
        const auto elements = static_cast<std::int64_t>(given.size());
        std::vector<std::byte> scales;
        const std::vector<std::uint8_t> codes = encoded(format, given, scales);
        DeviceBytes of_values(given, random() % 9 * sizeof(float));
        DeviceBytes of_codes(std::vector<std::uint8_t>(codes.size())),
            of_scales(std::vector<std::byte>(scales.size()));
        const OptimState state{of_codes.as<std::byte>(), of_scales.as<std::byte>()};
        on_device.encode[is_signed](of_values.as<float>(), state, elements, nullptr);
        ASSERT_EQ(of_codes.copy<std::uint8_t>(), codes) << number << ", row " << row;
        ASSERT_EQ(of_scales.copy<std::byte>(), scales) << number << ", row " << row;
        on_device.decode[is_signed](state, of_values.as<float>(), elements, nullptr);
        ASSERT_EQ(of_values.copy<float>(), decoded(format, codes, scales, elements))
            << number << ", row " << row;
        ASSERT_TRUE(of_values.is_whole_around() && of_codes.is_whole_around() && of_scales.is_whole_around());
      }
    }
  }
}

// kInt4Rank1 takes three launches: survey, step, settle. They do not change a tensor whose gradient is not
// finite.
TEST(OptimStepDevice, StepsMatricesAsTheCpu) {
  Random random(4);
  const cuda::OptimCudaKernels& on_device = cuda::optim_int4_rank1();
  for (const OptimRule rule : rules()) {
    for (std::size_t row = 0; row < 2 * std::size(kEveryChoice); ++row) {
      played::seed(random());
      std::vector<Matrix> expected;
      for (std::size_t i = 0, count = 1 + random() % 4; i < count; ++i) {
        Matrix& made = expected.emplace_back(random, rule, kShapes[random() % std::size(kShapes)],
                                             kEveryChoice[row % std::size(kEveryChoice)]);
        for (std::size_t step = 0, steps = 1 + random() % 3; step < steps; ++step) {
          if (step > 0) made.step(portable());
          made.give_gradient(random);
        }
        if (random() % 5 == 0) put_nonfinite(made.tensor, random);
      }
      Batch batch(expected, random);
      on_device.survey[expected[0].r()](batch.plain, nullptr);
      on_device.step[expected[0].r()](batch.plain, nullptr);
      on_device.settle(batch.plain, nullptr);
      auto tensor = batch.tensors.begin();
      const std::vector<unsigned long long> counted = batch.counters.copy<unsigned long long>();
      for (std::size_t i = 0; i < expected.size(); ++i, ++tensor) {
        ASSERT_EQ(static_cast<std::int64_t>(counted[i]), expected[i].step(portable())) << row;
        tensor->expect_is(expected[i].tensor,
                          "rule " + std::to_string(static_cast<int>(rule)) + ", row " + std::to_string(row));
      }
    }
  }
}

}  // namespace
}  // namespace reef::kernels
