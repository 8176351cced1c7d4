// Tests the order of calls in played NCCL: in groups, on several streams, in graphs, and in communicators of
// a subset of ranks.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "device/runtime/nccl_ranks.h"

namespace reef::played {
namespace {

class PlayedNcclOrder : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PlayedNcclOrder, testing::Values(2, 3, 4));

// All ranks send first. If the messages ran one after another, every rank would wait forever.
TEST_P(PlayedNcclOrder, MessagesOfAGroupDoNotWaitForEachOther) {
  in_ranks(GetParam(), [](Rank& self) {
    const Device<std::int32_t> from(ints(self.rank, kMany));
    const int next = (self.rank + 1) % self.ranks, before = (self.rank + self.ranks - 1) % self.ranks;
    const Device<std::int32_t> first(kMany), second(7), third(kMany), own(5);
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclSend(from.data(), kMany, ncclInt32, next, self.comm, self.stream));
    NCCL_OK(ncclSend(from.data() + 1, 7, ncclInt32, next, self.comm, self.stream));
    NCCL_OK(ncclSend(from.data() + 2, 5, ncclInt32, self.rank, self.comm, self.stream));
    NCCL_OK(ncclSend(from.data(), kMany, ncclInt32, before, self.comm, self.stream));
    NCCL_OK(ncclRecv(first.data(), kMany, ncclInt32, before, self.comm, self.stream));
    NCCL_OK(ncclRecv(own.data(), 5, ncclInt32, self.rank, self.comm, self.stream));
    NCCL_OK(ncclRecv(second.data(), 7, ncclInt32, before, self.comm, self.stream));
    NCCL_OK(ncclRecv(third.data(), kMany, ncclInt32, next, self.comm, self.stream));
    NCCL_OK(ncclGroupEnd());
    const Ints wanted = ints(before, kMany);
    EXPECT_EQ(first.read(self.stream), wanted);
    EXPECT_EQ(second.read(self.stream), Ints(wanted.begin() + 1, wanted.begin() + 8));
    EXPECT_EQ(third.read(self.stream), ints(next, kMany));
    EXPECT_EQ(own.read(self.stream),
              (Ints{self.rank * 100'000 + 2, self.rank * 100'000 + 3, self.rank * 100'000 + 4,
                    self.rank * 100'000 + 5, self.rank * 100'000 + 6}));
    end_well(self);
  });
}

TEST_P(PlayedNcclOrder, CollectivesOfAGroupAreInOrderAndBesideMessages) {
  in_ranks(GetParam(), [](Rank& self) {
    const std::size_t count = 1000;
    const Device<std::int32_t> a(ints(self.rank, count)), b(count), c(count), got(count);
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclGroupStart());
    if (self.rank == 0) {
      NCCL_OK(ncclRecv(got.data(), count, ncclInt32, 1, self.comm, self.stream));
    }
    NCCL_OK(ncclAllReduce(a.data(), b.data(), count, ncclInt32, ncclSum, self.comm, self.stream));
    NCCL_OK(ncclGroupEnd());
    NCCL_OK(ncclAllReduce(b.data(), c.data(), count, ncclInt32, ncclSum, self.comm, self.stream));
    if (self.rank == 1) {
      NCCL_OK(ncclSend(a.data(), count, ncclInt32, 0, self.comm, self.stream));
    }
    NCCL_OK(ncclGroupEnd());
    Ints wanted(count);
    for (std::size_t i = 0; i < count; ++i)
      for (int rank = 0; rank < self.ranks; ++rank) wanted[i] += self.ranks * ints(rank, count)[i];
    EXPECT_EQ(c.read(self.stream), wanted);
    if (self.rank == 0) {
      EXPECT_EQ(got.read(self.stream), ints(1, count));
    }
    end_well(self);
  });
}

// A different stream lags in each rank. If calls did not keep their order, calls of different sizes would
// meet.
TEST_P(PlayedNcclOrder, CallsOfACommunicatorAreInOrderOnAnyStreams) {
  in_ranks(GetParam(), [](Rank& self) {
    std::vector<cudaStream_t> streams(3);
    for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreate(&stream));
    played_cuda_delay_stream(streams[self.rank % 3], 3000);
    const Device<std::int32_t> data(Ints(64, 1));
    std::int32_t wanted = 1;
    for (std::size_t call = 0; call < 12; ++call) {
      const std::size_t count = 64 - call;
      NCCL_OK(ncclAllReduce(data.data(), data.data(), count, ncclInt32, ncclSum, self.comm,
                            streams[(call * call + 1) % 3]));
      wanted *= self.ranks;
    }
    for (const cudaStream_t stream : streams) CUDA_OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(data.read(self.stream)[0], wanted);
    end_well(self);
  });
}

TEST_P(PlayedNcclOrder, ACapturedCallRunsWithEachReplay) {
  in_ranks(GetParam(), [](Rank& self) {
    const Device<std::int32_t> data(Ints(10, 1));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    CUDA_OK(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
    NCCL_OK(ncclAllReduce(data.data(), data.data(), 10, ncclInt32, ncclSum, self.comm, self.stream));
    CUDA_OK(cudaStreamEndCapture(self.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&replayed, graph, 0));
    EXPECT_EQ(data.read(self.stream), Ints(10, 1));
    for (int i = 0; i < 3; ++i) CUDA_OK(cudaGraphLaunch(replayed, self.stream));
    NCCL_OK(ncclAllReduce(data.data(), data.data(), 10, ncclInt32, ncclMax, self.comm, self.stream));
    EXPECT_EQ(data.read(self.stream), Ints(10, self.ranks * self.ranks * self.ranks));
    end_well(self);
  });
}

TEST_P(PlayedNcclOrder, RanksOfOneColorAreOrderedByKey) {
  in_ranks(GetParam(), [](Rank& self) {
    Rank part = self;
    const int color = self.rank == 0 ? NCCL_SPLIT_NOCOLOR : 3;
    NCCL_OK(ncclCommSplit(self.comm, color, -self.rank, &part.comm, nullptr));
    if (self.rank == 0) {
      EXPECT_EQ(part.comm, nullptr);
    } else {
      NCCL_OK(ncclCommCount(part.comm, &part.ranks));
      NCCL_OK(ncclCommUserRank(part.comm, &part.rank));
      EXPECT_EQ(part.ranks, self.ranks - 1);
      EXPECT_EQ(part.rank, self.ranks - 1 - self.rank);
      const Device<std::int32_t> from(ints(self.rank, 3)), to(3);
      NCCL_OK(ncclBroadcast(from.data(), to.data(), 3, ncclInt32, 0, part.comm, self.stream));
      EXPECT_EQ(to.read(self.stream), ints(self.ranks - 1, 3));
      Rank again = part;
      NCCL_OK(ncclCommSplit(part.comm, part.rank, 0, &again.comm, nullptr));
      NCCL_OK(ncclCommCount(again.comm, &again.ranks));
      EXPECT_EQ(again.ranks, 1);
      NCCL_OK(ncclCommDestroy(again.comm));
      NCCL_OK(ncclCommFinalize(part.comm));
      EXPECT_EQ(ncclAllReduce(to.data(), to.data(), 3, ncclInt32, ncclSum, part.comm, self.stream),
                ncclInvalidUsage);
      NCCL_OK(ncclCommDestroy(part.comm));
    }
    end_well(self);
  });
}

TEST(PlayedNccl, RanksOfOneProcess) {
  in_processes(1, [](int) {
    ncclComm_t comms[kDevices] = {};
    NCCL_OK(ncclCommInitAll(comms, kDevices, nullptr));
    std::vector<cudaStream_t> streams(kDevices);
    std::vector<std::unique_ptr<Device<std::int32_t>>> data;
    for (int device = 0; device < kDevices; ++device) {
      int found = -1;
      NCCL_OK(ncclCommCuDevice(comms[device], &found));
      EXPECT_EQ(found, device);
      CUDA_OK(cudaSetDevice(device));
      CUDA_OK(cudaStreamCreate(&streams[device]));
      data.push_back(std::make_unique<Device<std::int32_t>>(ints(device, 1000)));
    }
    NCCL_OK(ncclGroupStart());
    for (int device = 0; device < kDevices; ++device)
      NCCL_OK(ncclBcast(data[device]->data(), 1000, ncclInt32, 1, comms[device], streams[device]));
    NCCL_OK(ncclGroupEnd());
    for (int device = 0; device < kDevices; ++device)
      EXPECT_EQ(data[device]->read(streams[device]), ints(1, 1000));
    for (const ncclComm_t comm : comms) NCCL_OK(ncclCommDestroy(comm));
  });
}

}  // namespace
}  // namespace reef::played
