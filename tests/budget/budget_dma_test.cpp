// Where addresses stay: memory that a device copies from or to does not move.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "reef/budget.h"
#include "support/environment.h"

#if __has_include(<liburing.h>)
#include <liburing.h>

namespace reef {
namespace {

constexpr std::uint64_t kMany = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kSize = 100000;
constexpr std::uint64_t kBytes = kSize * sizeof(float);

// A registered buffer is what a network card's or a graphics card's pinned memory is to the kernel: it keeps
// the frames, whatever happens to the addresses.
TEST(BudgetDma, ARegisteredBufferStaysWhereItIs) {
  const test::Environment addresses("REEF_ADDRESSES", "stay");
  if (const std::string may = Budget(kMany).addresses(); may.find("stay") != 0) GTEST_SKIP() << may;
  io_uring ring;
  if (::io_uring_queue_init(4, &ring, 0) != 0) GTEST_SKIP() << "io_uring is not to be had here";
  for (const bool born_before : {true, false}) {
    at::Tensor target;
    if (born_before) target = torch::ones({kSize});
    Budget budget(kMany, born_before ? std::vector<at::Tensor>{target} : std::vector<at::Tensor>{});
    if (!born_before) target = torch::ones({kSize});
    std::vector<at::Tensor> others;
    for (int i = 0; i < 8; ++i) others.push_back(torch::full({kSize}, static_cast<float>(i)));
    auto* const words = target.mutable_data_ptr<float>();
    const iovec buffer{words, kBytes};
    ASSERT_EQ(::io_uring_register_buffers(&ring, &buffer, 1), 0);
    const std::uint64_t all = budget.use().live_bytes;
    budget.set_bytes(all - 4 * kBytes);
    EXPECT_GT(budget.use().evictions, 0);
    // Of more than the others come to nothing can be made room but the buffer's, which is refused.
    EXPECT_THROW(budget.set_bytes(all - 8 * kBytes - kBytes / 2), c10::OutOfMemoryError);
    // The device writes behind the addresses, and whoever reads them finds it.
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const std::vector<float> sent(1000, 7);
    ASSERT_EQ(::write(ends[1], sent.data(), 4000), 4000);
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring);
    ::io_uring_prep_read_fixed(entry, ends[0], words, 4000, 0, 0);
    ASSERT_EQ(::io_uring_submit(&ring), 1);
    io_uring_cqe* done = nullptr;
    ASSERT_EQ(::io_uring_wait_cqe(&ring, &done), 0);
    EXPECT_EQ(done->res, 4000);
    ::io_uring_cqe_seen(&ring, done);
    EXPECT_EQ(std::memcmp(words, sent.data(), 4000), 0);
    // When the device has let go of it, it leaves as others do.
    ASSERT_EQ(::io_uring_unregister_buffers(&ring), 0);
    budget.set_bytes(all - 8 * kBytes - kBytes / 2);
    budget.set_bytes(kMany);
    EXPECT_EQ(target.sum().item<double>(), 1000 * 7 + kSize - 1000);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(others[i].mean().item<double>(), i);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ::io_uring_queue_exit(&ring);
}

}  // namespace
}  // namespace reef
#endif
