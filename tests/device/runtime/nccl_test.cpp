// Tests the results of played NCCL: every function with every type and op, between 1 to 4 processes, against
// a straightforward computation. Sizes are close to those of pieces and of parts of a reduction.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "device/runtime/nccl_ranks.h"

namespace reef::played {
namespace {

template <class T>
struct Type;
#define REEF_TYPE(of, number)                       \
  template <>                                       \
  struct Type<of> {                                 \
    static constexpr ncclDataType_t kType = number; \
  }
REEF_TYPE(std::int8_t, ncclInt8);
REEF_TYPE(std::uint8_t, ncclUint8);
REEF_TYPE(std::int32_t, ncclInt32);
REEF_TYPE(std::uint32_t, ncclUint32);
REEF_TYPE(std::int64_t, ncclInt64);
REEF_TYPE(std::uint64_t, ncclUint64);
REEF_TYPE(c10::Half, ncclFloat16);
REEF_TYPE(float, ncclFloat32);
REEF_TYPE(double, ncclFloat64);
REEF_TYPE(c10::BFloat16, ncclBfloat16);

template <class With>
void with_every_type(const With& with) {
  with(std::int8_t{});
  with(std::uint8_t{});
  with(std::int32_t{});
  with(std::uint32_t{});
  with(std::int64_t{});
  with(std::uint64_t{});
  with(c10::Half{});
  with(float{});
  with(double{});
  with(c10::BFloat16{});
}

constexpr std::size_t kPieceBytes = 256 << 10, kPartBytes = 1 << 20;
template <class T>
std::vector<std::size_t> sizes() {
  return {0, 1, 7, 64, 1023, kPieceBytes / sizeof(T), kPieceBytes / sizeof(T) + 1};
}
template <class T>
std::size_t larger_than_two_parts() {
  return 2 * kPartBytes / sizeof(T) + 3;
}

// Returns element i of a rank: a small integer, or a floating point number. Floating point numbers have very
// different magnitudes, so that a sum depends on its order.
template <class T>
T element(int rank, std::size_t i) {
  std::uint64_t bits =
      (i + 1) * 0x9E3779B97F4A7C15ULL + static_cast<std::uint64_t>(rank + 1) * 0xD1B54A32D192ED03ULL;
  bits = (bits ^ (bits >> 29)) * 0xBF58476D1CE4E5B9ULL;
  bits ^= bits >> 32;
  const int whole = static_cast<int>(bits % 201) - (std::is_unsigned_v<T> ? 0 : 100);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(whole);
  else
    return static_cast<T>(std::ldexp(static_cast<float>(whole), static_cast<int>((bits >> 40) % 9) - 7));
}
template <class T>
std::vector<T> elements(int rank, std::size_t count) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = element<T>(rank, i);
  return all;
}

// Computes the expected element. Integers are computed in 64 bits and then truncated.
template <class T>
T expected(ncclRedOp_t op, int ranks, std::size_t i, T factor = T(1)) {
  using Exact = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
  const bool scales = !std::is_integral_v<T> && op == ncclAvg;
  const T scale =
      scales ? static_cast<T>(std::is_same_v<T, double> ? 1.0 / ranks : static_cast<float>(1.0 / ranks))
             : factor;
  Exact all = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const Exact x = static_cast<Exact>(element<T>(rank, i)) * static_cast<Exact>(scale);
    if (rank == 0) {
      all = x;
    } else if (op == ncclProd) {
      all = all * x;
    } else if (op == ncclMin) {
      all = x < all ? x : all;
    } else if (op == ncclMax) {
      all = x > all ? x : all;
    } else {
      all = all + x;
    }
  }
  const T result = static_cast<T>(all);
  if constexpr (std::is_integral_v<T>)
    if (op == ncclAvg) return static_cast<T>(static_cast<std::int64_t>(result) / ranks);
  return result;
}

template <class T>
void expect_same(const std::vector<T>& found, const std::vector<T>& wanted, const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size()) << where;
  for (std::size_t i = 0; i < found.size(); ++i)
    if (std::memcmp(&found[i], &wanted[i], sizeof(T)) != 0 && !(found[i] == wanted[i]))
      FAIL() << where << ", element " << i << ": " << +found[i] << " instead of " << +wanted[i];
}
std::string place(const char* function, ncclDataType_t type, int op, std::size_t count, const Rank& self,
                  bool in_place) {
  return std::string(function) + ", type " + std::to_string(type) + ", op or root " + std::to_string(op) +
         ", " + std::to_string(count) + " elements, rank " + std::to_string(self.rank) + " of " +
         std::to_string(self.ranks) + (in_place ? ", in place" : "");
}

// Tests all-reduce, reduce and reduce-scatter of this many elements.
template <class T>
void reduce(const Rank& self, ncclRedOp_t op, std::size_t count, bool in_place, T factor = T(1),
            ncclRedOp_t handle = ncclMaxRedOp) {
  const ncclRedOp_t given = handle == ncclMaxRedOp ? op : handle;
  const ncclDataType_t type = Type<T>::kType;
  std::vector<T> wanted(count);
  for (std::size_t i = 0; i < count; ++i) wanted[i] = expected<T>(op, self.ranks, i, factor);
  const std::vector<T> mine = elements<T>(self.rank, count);
  {
    const Device<T> from(mine), to(std::vector<T>(count, T(77)));
    T* const result = in_place ? from.data() : to.data();
    NCCL_OK(ncclAllReduce(from.data(), result, count, type, given, self.comm, self.stream));
    expect_same((in_place ? from : to).read(self.stream), wanted,
                place("all-reduce", type, op, count, self, in_place));
    if (!in_place) expect_same(from.read(self.stream), mine, "what was sent");
  }
  for (int root = 0; root < self.ranks; ++root) {
    const Device<T> from(mine), to(std::vector<T>(count, T(77)));
    const bool receives = self.rank == root;
    T* const result = in_place ? from.data() : receives ? to.data() : nullptr;
    NCCL_OK(ncclReduce(from.data(), result, count, type, given, root, self.comm, self.stream));
    expect_same((in_place ? from : to).read(self.stream),
                receives   ? wanted
                : in_place ? mine
                           : std::vector<T>(count, T(77)),
                place("reduce", type, op, count, self, in_place));
  }
  const std::size_t block = count / static_cast<std::size_t>(self.ranks),
                    at = block * static_cast<std::size_t>(self.rank);
  const Device<T> from(mine), to(std::vector<T>(block, T(77)));
  NCCL_OK(ncclReduceScatter(from.data(), in_place ? from.data() + at : to.data(), block, type, given,
                            self.comm, self.stream));
  std::vector<T> found = (in_place ? from : to).read(self.stream);
  if (in_place) found = {found.begin() + at, found.begin() + at + block};
  expect_same(found, {wanted.begin() + at, wanted.begin() + at + block},
              place("reduce-scatter", type, op, count, self, in_place));
}

class PlayedNccl : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PlayedNccl, testing::Values(1, 2, 3, 4));

TEST_P(PlayedNccl, ReductionsRoundInTheOrderOfTheRanks) {
  in_ranks(GetParam(), [](Rank& self) {
    played_cuda_seed(static_cast<std::uint64_t>(self.rank));
    played_cuda_delay(static_cast<int>(Work::kCommunication), 20);
    with_every_type([&](auto value) {
      using T = decltype(value);
      for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
        for (const std::size_t count : {0, 1, 7, 64, 1023}) reduce<T>(self, op, count, count % 2 == 0);
        reduce<T>(self, op, 1023, true);
      }
      for (const std::size_t count : sizes<T>()) reduce<T>(self, ncclSum, count, false);
      reduce<T>(self, ncclSum, larger_than_two_parts<T>(), sizeof(T) % 4 == 0);
    });
    end_well(self);
  });
}

TEST_P(PlayedNccl, SumsOfMultiplesTakeTheFactorFromHostOrDevice) {
  in_ranks(GetParam(), [](Rank& self) {
    with_every_type([&](auto value) {
      using T = decltype(value);
      T factor = static_cast<T>(std::is_integral_v<T> ? 3.0F : 0.3F);
      ncclRedOp_t op = ncclSum;
      NCCL_OK(ncclRedOpCreatePreMulSum(&op, &factor, Type<T>::kType, ncclScalarHostImmediate, self.comm));
      const T kept = factor;
      factor = T(9);  // The old factor has been read already.
      reduce<T>(self, ncclSum, 65, false, kept, op);
      NCCL_OK(ncclRedOpDestroy(op, self.comm));
      const Device<T> there(std::vector<T>{kept});
      NCCL_OK(ncclRedOpCreatePreMulSum(&op, there.data(), Type<T>::kType, ncclScalarDevice, self.comm));
      const Device<T> from(elements<T>(self.rank, 5)), to(5);
      NCCL_OK(ncclAllReduce(from.data(), to.data(), 5, Type<T>::kType, op, self.comm, self.stream));
      NCCL_OK(ncclRedOpDestroy(op, self.comm));  // The reduction may not have run yet.
      std::vector<T> wanted(5);
      for (std::size_t i = 0; i < 5; ++i) wanted[i] = expected<T>(ncclSum, self.ranks, i, kept);
      expect_same(to.read(self.stream), wanted, "factor in device memory");
    });
    end_well(self);
  });
}

TEST_P(PlayedNccl, LargestAndSmallestPassOverWhatIsNotANumber) {
  in_ranks(GetParam(), [](Rank& self) {
    const float none = std::numeric_limits<float>::quiet_NaN();
    const Device<float> from(std::vector<float>{self.rank == 0 ? none : 4.0F, none}), to(2);
    NCCL_OK(ncclAllReduce(from.data(), to.data(), 2, ncclFloat32, ncclMax, self.comm, self.stream));
    const std::vector<float> found = to.read(self.stream);
    if (self.ranks > 1) {
      EXPECT_EQ(found[0], 4.0F);
    }
    EXPECT_TRUE(std::isnan(found[1]));
    end_well(self);
  });
}

// Tests every function that moves elements without reducing them.
template <class T>
void move(const Rank& self, std::size_t count, int root, bool in_place) {
  const ncclDataType_t type = Type<T>::kType;
  const auto ranks = static_cast<std::size_t>(self.ranks), rank = static_cast<std::size_t>(self.rank);
  const bool is_root = self.rank == root;
  const std::vector<T> none(count * ranks, T(77)), mine = elements<T>(self.rank, count * ranks);
  std::vector<T> of_all;  // The result of a gather.
  for (int peer = 0; peer < self.ranks; ++peer)
    for (std::size_t i = 0; i < count; ++i) of_all.push_back(element<T>(peer, i));
  const auto first = [&](const std::vector<T>& all, std::size_t block = 0) {
    return std::vector<T>(all.begin() + block * count, all.begin() + (block + 1) * count);
  };
  const auto said = [&](const char* what) { return place(what, type, root, count, self, in_place); };
  {
    const Device<T> from(mine), to(none);
    T* const result = in_place ? from.data() : to.data();
    NCCL_OK(ncclBroadcast(is_root || in_place ? from.data() : nullptr, result, count, type, root, self.comm,
                          self.stream));
    expect_same(first((in_place ? from : to).read(self.stream)), first(elements<T>(root, count)),
                said("broadcast"));
    NCCL_OK(ncclBcast(from.data(), count, type, root, self.comm, self.stream));
    expect_same(first(from.read(self.stream)), first(elements<T>(root, count)), said("bcast"));
  }
  {
    const Device<T> from(mine), to(none);
    if (in_place) {
      CUDA_OK(cudaMemcpy(to.data() + rank * count, from.data(), count * sizeof(T), cudaMemcpyDeviceToDevice));
    }
    NCCL_OK(ncclAllGather(in_place ? to.data() + rank * count : from.data(), to.data(), count, type,
                          self.comm, self.stream));
    expect_same(to.read(self.stream), of_all, said("all-gather"));
  }
  {
    const Device<T> from(mine), to(none);
    if (in_place) {
      CUDA_OK(cudaMemcpy(to.data() + rank * count, from.data(), count * sizeof(T), cudaMemcpyDeviceToDevice));
    }
    NCCL_OK(ncclGather(in_place && is_root ? to.data() + rank * count : from.data(),
                       is_root ? to.data() : nullptr, count, type, root, self.comm, self.stream));
    std::vector<T> untouched = none;
    if (in_place) std::copy_n(mine.begin(), count, untouched.begin() + rank * count);
    expect_same(to.read(self.stream), is_root ? of_all : untouched, said("gather"));
  }
  const Device<T> from(mine), to(none);
  NCCL_OK(ncclAlltoAll(from.data(), to.data(), count, type, self.comm, self.stream));
  std::vector<T> wanted;
  for (int peer = 0; peer < self.ranks; ++peer)
    for (std::size_t i = 0; i < count; ++i) wanted.push_back(element<T>(peer, rank * count + i));
  expect_same(to.read(self.stream), wanted, said("all-to-all"));
  T* const result = in_place && is_root ? from.data() + rank * count : to.data();
  NCCL_OK(ncclScatter(is_root ? from.data() : nullptr, result, count, type, root, self.comm, self.stream));
  expect_same(first((result == to.data() ? to : from).read(self.stream), result == to.data() ? 0 : rank),
              first(elements<T>(root, count * ranks), rank), said("scatter"));
}

TEST_P(PlayedNccl, MovesEveryType) {
  in_ranks(GetParam(), [](Rank& self) {
    with_every_type([&](auto value) {
      using T = decltype(value);
      for (const std::size_t count : sizes<T>())
        move<T>(self, count, static_cast<int>(count) % self.ranks, false);
      for (int root = 0; root < self.ranks; ++root) move<T>(self, 33, root, true);
    });
    end_well(self);
  });
}

// Functions that only move elements do not interpret them, so they accept 8-bit floating point types.
TEST_P(PlayedNccl, MovesEightBitFloats) {
  in_ranks(GetParam(), [](Rank& self) {
    const Device<std::uint8_t> from(elements<std::uint8_t>(0, 100)), to(100);
    NCCL_OK(ncclBroadcast(from.data(), to.data(), 100, ncclFloat8e4m3, 0, self.comm, self.stream));
    expect_same(to.read(self.stream), elements<std::uint8_t>(0, 100), "float8");
    EXPECT_EQ(ncclAllReduce(from.data(), to.data(), 100, ncclFloat8e4m3, ncclSum, self.comm, self.stream),
              ncclInvalidArgument);
    end_well(self);
  });
}

}  // namespace
}  // namespace reef::played
