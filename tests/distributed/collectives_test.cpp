// Run as several ranks by tests/support/ranks.py. Every rank computes by itself what all of them together
// must get.
#include "reef/collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "reef/error.h"
#include "reef/process_group.h"

namespace reef {
namespace {

using Tensors = std::vector<at::Tensor>;

/// One group for the whole program.
const ProcessGroupPtr& group() {
  static const ProcessGroupPtr the_group = init_process_group();
  return the_group;
}
int rank() { return group()->getRank(); }
int size() { return group()->getSize(); }

const std::vector<at::ScalarType> kFloating = {at::kFloat,    at::kDouble,       at::kHalf,
                                               at::kBFloat16, at::kComplexFloat, at::kComplexDouble};
const std::vector<at::ScalarType> kIntegral = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};

/// What rank `of` holds in tensor number `index`: whole numbers so small that they are exact in every dtype
/// used.
at::Tensor value(int of, int index, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto count = c10::multiply_integers(sizes);
  const at::Tensor flat = (at::arange(count, at::kDouble) * 7 + of * 3 + index).remainder(11.0);
  return flat.reshape(sizes).to(dtype);
}

at::Tensor sum_of_values(int index, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor sum = value(0, index, sizes, at::kDouble);
  for (int of = 1; of < size(); ++of) sum += value(of, index, sizes, at::kDouble);
  return sum.to(dtype);
}

at::Tensor bytes(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous).view(-1).view(at::kByte);
}

bool same(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         at::equal(bytes(left), bytes(right));
}

/// Divides parts of complex numbers one by one, as a mean does.
at::Tensor divided(const at::Tensor& tensor, int by) {
  return tensor.is_complex() ? at::view_as_complex(at::view_as_real(tensor).div(by)) : tensor.div(by);
}

TEST(AllReduce, SumsEveryDtypeInBucketsOfEverySize) {
  const std::vector<std::vector<int64_t>> shapes = {{1}, {7, 3}, {0}, {}, {2, 0, 5}, {1000}, {64, 33}, {2}};
  auto dtypes = kFloating;
  dtypes.insert(dtypes.end(), kIntegral.begin(), kIntegral.end());
  dtypes.insert(dtypes.end(), {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn});
  for (const std::int64_t bucket_bytes :
       {std::int64_t{1}, std::int64_t{64}, std::int64_t{5000}, std::int64_t{1} << 25}) {
    Tensors tensors;
    Tensors expected;
    for (const auto dtype : dtypes) {  // all dtypes in one list
      for (const auto& shape : shapes) {
        const int index = static_cast<int>(tensors.size());
        tensors.push_back(value(rank(), index, shape, dtype));
        expected.push_back(sum_of_values(index, shape, dtype));
      }
    }
    all_reduce(tensors, group(), Reduction::kSum, bucket_bytes);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(same(tensors[i], expected[i]))
          << tensors[i].toString() << " number " << i << ", buckets of " << bucket_bytes;
    }
  }
}

TEST(AllReduce, MeanIsTheSumDividedByTheWorldSize) {
  for (const auto dtype : kFloating) {
    for (const std::int64_t bucket_bytes : {std::int64_t{16}, std::int64_t{1} << 20}) {
      Tensors tensors = {value(rank(), 0, {50}, dtype), value(rank(), 1, {3, 3}, dtype)};
      const Tensors expected = {divided(sum_of_values(0, {50}, dtype), size()),
                                divided(sum_of_values(1, {3, 3}, dtype), size())};
      all_reduce(tensors, group(), Reduction::kMean, bucket_bytes);
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(same(tensors[i], expected[i])) << c10::toString(dtype);
    }
  }
}

/// Random lists: shapes, dtypes, layouts and bucket sizes from a seed that all ranks share.
TEST(AllReduce, AgreesWithTheSumOverRandomLists) {
  std::mt19937 random(2024);
  const auto draw = [&random](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  for (int round = 0; round < 60; ++round) {
    Tensors tensors;
    Tensors expected;
    const int count = draw(40);
    for (int i = 0; i < count; ++i) {
      const std::vector<int64_t> sizes = {draw(20), 1 + draw(20)};
      const auto dtype = draw(2) == 0 ? kFloating[static_cast<std::size_t>(draw(6))]
                                      : kIntegral[static_cast<std::size_t>(draw(5))];
      auto tensor = value(rank(), i, sizes, dtype);
      const int layout = draw(3);
      if (layout == 1) tensor = tensor.t().contiguous().t();                    // transposed
      if (layout == 2) tensor = at::stack({tensor, tensor}, -1).select(-1, 1);  // every second element
      tensors.push_back(tensor);
      expected.push_back(sum_of_values(i, sizes, dtype));
    }
    const std::int64_t bucket_bytes = 1 + draw(3000);
    all_reduce(tensors, group(), Reduction::kSum, bucket_bytes);
    for (int i = 0; i < count; ++i) {
      ASSERT_TRUE(same(tensors[static_cast<std::size_t>(i)], expected[static_cast<std::size_t>(i)]))
          << "round " << round << ", tensor " << i << ", buckets of " << bucket_bytes;
    }
  }
}

TEST(AllReduce, WritesOnlyTheElementsOfAView) {
  at::Tensor whole = at::full({4, 6}, 100.0);
  const at::Tensor view = whole.slice(1, 1, 6, 2);
  view.fill_(rank() + 1.0);
  all_reduce({view}, group());
  at::Tensor expected = at::full({4, 6}, 100.0);
  expected.slice(1, 1, 6, 2).fill_(size() * (size() + 1) / 2.0);
  EXPECT_TRUE(at::equal(whole, expected));
}

TEST(AllReduce, HandlesParametersConjugatesBoolsAndRepeats) {
  const at::Tensor leaf = at::full({3}, rank() + 1.0).requires_grad_();
  const auto version = leaf._version();
  all_reduce({leaf}, group());
  EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
  EXPECT_TRUE(at::equal(leaf, at::full({3}, size() * (size() + 1) / 2.0)));
  EXPECT_GT(leaf._version(), version) << "autograd must see the change";

  const at::Tensor complex = at::complex(at::full({2}, 1.0), at::full({2}, rank() * 1.0));
  const at::Tensor conjugate = complex.conj();
  all_reduce({conjugate}, group());
  EXPECT_TRUE(at::equal(at::imag(complex), at::full({2}, size() * (size() - 1) / 2.0)));

  at::Tensor flags = at::zeros({3}, at::kBool);  // true where any rank says so
  flags[0] = true;
  flags[1] = rank() == 0;
  all_reduce({flags}, group());
  EXPECT_TRUE(at::equal(flags.to(at::kInt), at::tensor({1, 1, 0}, at::kInt)));

  const at::Tensor tied = at::ones({5});
  const at::Tensor other = at::ones({5});
  all_reduce({tied, other, tied}, group(), Reduction::kSum, 1);
  EXPECT_TRUE(at::equal(tied, at::full({5}, size() * 1.0F)))
      << "a tensor that is listed twice is summed once";
}

TEST(AllReduce, IntegersWrapAroundAsTheirDtypeDoes) {
  const at::Tensor small = at::full({2}, 30000, at::kShort);
  all_reduce({small}, group());
  EXPECT_EQ(small[0].item<std::int16_t>(), static_cast<std::int16_t>(30000 * size()));
}

TEST(AllReduce, TakesAnEmptyList) {
  all_reduce({}, group());
  all_reduce({at::empty({0, 4})}, group());
}

TEST(Broadcast, GivesEveryRootsBytesToAll) {
  auto dtypes = kFloating;
  dtypes.insert(dtypes.end(), kIntegral.begin(), kIntegral.end());
  dtypes.insert(dtypes.end(), {at::kBool, at::kFloat8_e4m3fn});
  for (int root = 0; root < size(); ++root) {
    for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{300}, std::int64_t{1} << 20}) {
      Tensors tensors;
      Tensors expected;
      for (const auto dtype : dtypes) {
        for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 5}, {}, {0}, {301}}) {
          const int index = static_cast<int>(tensors.size());
          tensors.push_back(value(rank(), index, sizes, dtype));
          expected.push_back(value(root, index, sizes, dtype));
        }
      }
      tensors.push_back(value(rank(), 0, {6, 4}, at::kFloat).t());
      expected.push_back(value(root, 0, {6, 4}, at::kFloat).t());
      broadcast(tensors, group(), root, bucket_bytes);
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(same(tensors[i], expected[i]))
            << tensors[i].toString() << " number " << i << " from root " << root;
      }
    }
  }
}

TEST(Broadcast, KeepsNotANumberAndMinusZeroAsTheyAre) {
  const at::Tensor values = rank() == 0 ? at::tensor({std::nanf("7"), -0.0F}) : at::zeros({2});
  broadcast({values}, group());
  EXPECT_TRUE(std::isnan(values[0].item<float>()));
  EXPECT_TRUE(std::signbit(values[1].item<float>()));
}

/// Such a tensor is contiguous by LibTorch's rules, whatever its strides.
TEST(Broadcast, TakesOneElementOutOfEveryOther) {
  const at::Tensor pairs = at::full({1, 2}, rank() + 5.0);
  broadcast({pairs.slice(1, 1, 2, 1).t()}, group());
  broadcast({pairs.as_strided({1}, {2})}, group());
  EXPECT_TRUE(at::equal(pairs, at::full({1, 2}, 5.0)));
}

TEST(Barrier, NoneLeavesBeforeAllHaveCome) {
  const auto store = group()->getStore();
  for (int round = 0; round < 20; ++round) {
    const auto key = "barrier_test_" + std::to_string(round);
    if (round % size() == rank()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    store->add(key, 1);
    barrier(group());
    EXPECT_EQ(store->add(key, 0), size());
  }
}

/// Ranks that pass different things must not reach the backend: gloo would end the process, or add wrong
/// elements. Afterwards the group is as good as before.
TEST(Disagreement, IsRefusedOnEveryRankAndHarmsNothing) {
  const bool odd_one = rank() == size() - 1;
  const auto ones = [](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::ones(sizes, dtype);
  };
  const std::vector<std::pair<const char*, std::function<void()>>> rows = {
      {"sizes", [&] { all_reduce({ones({odd_one ? 11 : 10})}, group()); }},
      {"shapes",
       [&] {
         all_reduce({ones({odd_one ? 2 : 6, odd_one ? 6 : 2})}, group());
       }},
      {"dtypes", [&] { all_reduce({ones({8}, odd_one ? at::kFloat : at::kInt)}, group()); }},
      {"number", [&] { all_reduce(Tensors(odd_one ? 3 : 2, ones({4})), group()); }},
      {"order",
       [&] {
         all_reduce({ones({odd_one ? 1 : 2}), ones({odd_one ? 2 : 1})}, group());
       }},
      {"buckets",
       [&] {
         all_reduce({ones({4}), ones({4})}, group(), Reduction::kSum, odd_one ? 16 : 32);
       }},
      {"reduction", [&] { all_reduce({ones({4})}, group(), odd_one ? Reduction::kSum : Reduction::kMean); }},
      {"root", [&] { broadcast({ones({4})}, group(), odd_one ? 1 : 0); }},
      {"collective", [&] { odd_one ? all_reduce({ones({4})}, group()) : broadcast({ones({4})}, group()); }},
  };
  for (const auto& [what, run] : rows) {
    try {
      run();
      ADD_FAILURE() << "ranks that disagree on " << what << " were not refused";
    } catch (const ConfigError& error) {
      const auto text = message_of(error);
      EXPECT_NE(text.find("on rank " + std::to_string(rank())), std::string::npos) << text;
      EXPECT_NE(text.find("pass the same on every rank"), std::string::npos) << text;
    }
  }
  const at::Tensor after = at::ones({3});
  all_reduce({after}, group());
  EXPECT_TRUE(at::equal(after, at::full({3}, size() * 1.0F)));
}

TEST(Arguments, AreRefusedBeforeAnythingIsSent) {
  const at::Tensor good = at::ones({2});
  const std::vector<std::pair<const char*, std::function<void()>>> rows = {
      {"no process group", [&] { all_reduce({good}, nullptr); }},
      {"bucket_bytes 0", [&] { all_reduce({good}, group(), Reduction::kSum, 0); }},
      {"undefined",
       [&] {
         all_reduce({good, at::Tensor()}, group());
       }},
      {"not dense", [&] { all_reduce({good.to_sparse()}, group()); }},
      {"expanded", [&] { all_reduce({at::ones({1}).expand({4})}, group()); }},
      {"no fractions", [&] { all_reduce({at::ones({2}, at::kInt)}, group(), Reduction::kMean); }},
      {"root -1", [&] { broadcast({good}, group(), -1); }},
      {"root", [&] { broadcast({good}, group(), size()); }},
      {"no process group", [&] { barrier(nullptr); }},
  };
  for (const auto& [words, run] : rows) {
    try {
      run();
      ADD_FAILURE() << words;
    } catch (const ConfigError& error) {
      EXPECT_NE(message_of(error).find(words), std::string::npos) << message_of(error);
    }
  }
  EXPECT_TRUE(at::equal(good, at::ones({2})));
}

/// A group that the program made by other means: same collectives; when one fails, the rank cannot be named.
class FailingBackend final : public c10d::Backend {
 public:
  explicit FailingBackend(const c10::intrusive_ptr<c10d::Backend>& working)
      : c10d::Backend(working->getRank(), working->getSize()), working_(working) {}
  const std::string getBackendName() const override { return "failing"; }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return working_->allgather(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (fails) C10_THROW_ERROR(DistBackendError, "the cable is cut");
    return working_->allreduce(tensors, options);
  }
  bool fails = false;

 private:
  c10::intrusive_ptr<c10d::Backend> working_;
};

TEST(HandedInGroup, WorksAndSaysWhatItCannotTell) {
  const auto backend = c10::make_intrusive<FailingBackend>(group()->getBackend(c10::kCPU));
  const auto other = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>("other", group()->getStore()), rank(), size());
  other->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM, c10::intrusive_ptr<c10d::Backend>(backend));
  other->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  const at::Tensor tensor = at::ones({3});
  all_reduce({tensor}, other);
  EXPECT_TRUE(at::equal(tensor, at::full({3}, size() * 1.0F)));
  backend->fails = true;
  try {
    all_reduce({tensor}, other);
    ADD_FAILURE() << "the failure was not seen";
  } catch (const RankFailed& error) {
    EXPECT_EQ(error.failed_rank(), -1);
    EXPECT_NE(message_of(error).find("the cable is cut"), std::string::npos) << message_of(error);
    EXPECT_NE(message_of(error).find("init_process_group"), std::string::npos) << message_of(error);
  }
}

}  // namespace
}  // namespace reef
