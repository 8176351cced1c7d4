// Measures rounding a gradient to 16 bits with the error that is held back, and adding up what two ranks have
// rounded: in one pass, beside LibTorch's operators one after another and beside a plain copy, on one thread
// and in memory that has been touched.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "harness.h"
#include "kernels/sixteen_bit.h"

namespace {

using at::Tensor;
using reef::bench::in_turn;
using reef::bench::print_with_ratios;
using reef::bench::Result;
using reef::kernels::FloatFormat;

constexpr int kRounds = 31;

const std::uint16_t* codes_of(const Tensor& tensor) {
  return static_cast<const std::uint16_t*>(tensor.const_data_ptr());
}

void measure(const std::string& size, std::int64_t elements, int times) {
  const Tensor gradient = torch::randn({elements}), before = torch::randn({elements}).mul(1e-3);
  const Tensor left = torch::empty({elements});
  const auto repeat = [&](const auto& work) {
    return [times, work] {
      for (int i = 0; i < times; ++i) work();
    };
  };
  const double all = static_cast<double>(elements) * times;
  for (const auto& [name, dtype, format] : {std::tuple("bfloat16", at::kBFloat16, FloatFormat::kBFloat16),
                                            std::tuple("float16", at::kHalf, FloatFormat::kFloat16)}) {
    const Tensor codes = gradient.to(dtype), other = before.to(dtype), rounded = torch::empty_like(codes);
    const std::string title = std::string("sixteen_bit/") + size + " to " + name + ", with what is held back";
    const std::vector<Result> round = in_turn(
        {{"copy", {}, repeat([=] { left.copy_(gradient); }), {}},
         {"operators",
          {},
          repeat([=, to = dtype] {
            left.copy_(gradient).add_(before);
            const Tensor sent = left.to(to);
            left.sub_(sent).nan_to_num_(0, 0, 0);
          }),
          {}},
         {"one pass",
          {},
          repeat([=, to = format] {
            reef::kernels::round_to_sixteen_bits(
                gradient.const_data_ptr<float>(), before.const_data_ptr<float>(), elements, to,
                static_cast<std::uint16_t*>(rounded.mutable_data_ptr()), left.mutable_data_ptr<float>());
          }),
          {}}},
        kRounds, all);
    print_with_ratios(title, round, "ns");
    const std::string of_sum = std::string("sixteen_bit/mean of two ") + size + " of " + name;
    const std::vector<Result> sum =
        in_turn({{"copy", {}, repeat([=] { left.copy_(gradient); }), {}},
                 {"operators", {}, repeat([=] { left.copy_(codes).add_(other).div_(2); }), {}},
                 {"one pass",
                  {},
                  repeat([=, to = format] {
                    reef::kernels::sum_of_sixteen_bits({codes_of(codes), codes_of(other)}, elements, to, 2,
                                                       left.mutable_data_ptr<float>());
                  }),
                  {}}},
                kRounds, all);
    print_with_ratios(of_sum, sum, "ns");
  }
}

}  // namespace

int main() {
  at::set_num_threads(1);
  reef::bench::keep_pages();
  measure("64 Ki", 1 << 16, 5);
  measure("24 Mi", 24 << 20, 1);
}
