// Tests what of played NCCL is not arithmetic: groups, order, communicators of some ranks, and that what NCCL
// leaves undefined, or waits for without end, is told.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/runtime/nccl_ranks.h"

namespace reef::played {
namespace {

using Ints = std::vector<std::int32_t>;

Ints ints(int rank, std::size_t count) {
  Ints all(count);
  std::iota(all.begin(), all.end(), rank * 100'000);
  return all;
}
std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
    if (file.path().filename().string().find("nccl") != std::string::npos) names.insert(file.path());
  return names;
}
ncclResult_t trouble(const Rank& self) {
  ncclResult_t error = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(self.comm, &error), ncclSuccess);
  return error;
}
ncclResult_t await_trouble(const Rank& self) {
  while (trouble(self) == ncclSuccess) usleep(1000);
  return trouble(self);
}
std::string words() { return ncclGetLastError(nullptr); }
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Larger than any buffer between two ranks.
constexpr std::size_t kMany = 300'000;

class PlayedNcclOrder : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PlayedNcclOrder, testing::Values(2, 3, 4));

// All ranks send first: one by one, everybody would wait for everybody.
TEST_P(PlayedNcclOrder, MessagesOfAGroupDoNotWaitForEachOther) {
  in_ranks(GetParam(), [](Rank& self) {
    const Device<std::int32_t> from(ints(self.rank, kMany));
    const int next = (self.rank + 1) % self.ranks, before = (self.rank + self.ranks - 1) % self.ranks;
    const Device<std::int32_t> first(kMany), second(7), third(kMany), own(5);
    OK(ncclGroupStart());
    OK(ncclSend(from.data(), kMany, ncclInt32, next, self.comm, self.stream));
    OK(ncclSend(from.data() + 1, 7, ncclInt32, next, self.comm, self.stream));
    OK(ncclSend(from.data() + 2, 5, ncclInt32, self.rank, self.comm, self.stream));
    OK(ncclSend(from.data(), kMany, ncclInt32, before, self.comm, self.stream));
    OK(ncclRecv(first.data(), kMany, ncclInt32, before, self.comm, self.stream));
    OK(ncclRecv(own.data(), 5, ncclInt32, self.rank, self.comm, self.stream));
    OK(ncclRecv(second.data(), 7, ncclInt32, before, self.comm, self.stream));
    OK(ncclRecv(third.data(), kMany, ncclInt32, next, self.comm, self.stream));
    OK(ncclGroupEnd());
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
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    if (self.rank == 0) {
      OK(ncclRecv(got.data(), count, ncclInt32, 1, self.comm, self.stream));
    }
    OK(ncclAllReduce(a.data(), b.data(), count, ncclInt32, ncclSum, self.comm, self.stream));
    OK(ncclGroupEnd());
    OK(ncclAllReduce(b.data(), c.data(), count, ncclInt32, ncclSum, self.comm, self.stream));
    if (self.rank == 1) {
      OK(ncclSend(a.data(), count, ncclInt32, 0, self.comm, self.stream));
    }
    OK(ncclGroupEnd());
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

// Each rank lets another of its streams lag, and calls of different sizes would not meet.
TEST_P(PlayedNcclOrder, CallsOfACommunicatorAreInOrderOnAnyStreams) {
  in_ranks(GetParam(), [](Rank& self) {
    std::vector<cudaStream_t> streams(3);
    for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreate(&stream));
    played_cuda_delay_stream(streams[self.rank % 3], 3000);
    const Device<std::int32_t> data(Ints(64, 1));
    std::int32_t wanted = 1;
    for (std::size_t call = 0; call < 12; ++call) {
      const std::size_t count = 64 - call;
      OK(ncclAllReduce(data.data(), data.data(), count, ncclInt32, ncclSum, self.comm,
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
    OK(ncclAllReduce(data.data(), data.data(), 10, ncclInt32, ncclSum, self.comm, self.stream));
    CUDA_OK(cudaStreamEndCapture(self.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&replayed, graph, 0));
    EXPECT_EQ(data.read(self.stream), Ints(10, 1));
    for (int i = 0; i < 3; ++i) CUDA_OK(cudaGraphLaunch(replayed, self.stream));
    OK(ncclAllReduce(data.data(), data.data(), 10, ncclInt32, ncclMax, self.comm, self.stream));
    EXPECT_EQ(data.read(self.stream), Ints(10, self.ranks * self.ranks * self.ranks));
    end_well(self);
  });
}

TEST_P(PlayedNcclOrder, RanksOfOneColorAreOrderedByKey) {
  in_ranks(GetParam(), [](Rank& self) {
    Rank part = self;
    const int color = self.rank == 0 ? NCCL_SPLIT_NOCOLOR : 3;
    OK(ncclCommSplit(self.comm, color, -self.rank, &part.comm, nullptr));
    if (self.rank == 0) {
      EXPECT_EQ(part.comm, nullptr);
    } else {
      OK(ncclCommCount(part.comm, &part.ranks));
      OK(ncclCommUserRank(part.comm, &part.rank));
      EXPECT_EQ(part.ranks, self.ranks - 1);
      EXPECT_EQ(part.rank, self.ranks - 1 - self.rank);
      const Device<std::int32_t> from(ints(self.rank, 3)), to(3);
      OK(ncclBroadcast(from.data(), to.data(), 3, ncclInt32, 0, part.comm, self.stream));
      EXPECT_EQ(to.read(self.stream), ints(self.ranks - 1, 3));
      Rank again = part;
      OK(ncclCommSplit(part.comm, part.rank, 0, &again.comm, nullptr));
      OK(ncclCommCount(again.comm, &again.ranks));
      EXPECT_EQ(again.ranks, 1);
      OK(ncclCommDestroy(again.comm));
      OK(ncclCommFinalize(part.comm));
      EXPECT_EQ(ncclAllReduce(to.data(), to.data(), 3, ncclInt32, ncclSum, part.comm, self.stream),
                ncclInvalidUsage);
      OK(ncclCommDestroy(part.comm));
    }
    end_well(self);
  });
}

TEST(PlayedNccl, RanksOfOneProcess) {
  in_processes(1, [](int) {
    ncclComm_t comms[kDevices] = {};
    OK(ncclCommInitAll(comms, kDevices, nullptr));
    std::vector<cudaStream_t> streams(kDevices);
    std::vector<std::unique_ptr<Device<std::int32_t>>> data;
    for (int device = 0; device < kDevices; ++device) {
      int found = -1;
      OK(ncclCommCuDevice(comms[device], &found));
      EXPECT_EQ(found, device);
      CUDA_OK(cudaSetDevice(device));
      CUDA_OK(cudaStreamCreate(&streams[device]));
      data.push_back(std::make_unique<Device<std::int32_t>>(ints(device, 1000)));
    }
    OK(ncclGroupStart());
    for (int device = 0; device < kDevices; ++device)
      OK(ncclBcast(data[device]->data(), 1000, ncclInt32, 1, comms[device], streams[device]));
    OK(ncclGroupEnd());
    for (int device = 0; device < kDevices; ++device)
      EXPECT_EQ(data[device]->read(streams[device]), ints(1, 1000));
    for (const ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  });
}

// What ranks 0 and 1 call in the same place of their communicator, where they should call the same.
struct Mistake {
  const char* of_0;
  const char* of_1;
  std::function<ncclResult_t(std::int32_t*, const Rank&)> call_0, call_1;
};
std::vector<Mistake> mistakes() {
  const auto reduce = [](std::size_t count, ncclDataType_t type, ncclRedOp_t op) {
    return [=](std::int32_t* data, const Rank& self) {
      return ncclAllReduce(data, data, count, type, op, self.comm, self.stream);
    };
  };
  const auto broadcast = [](int root) {
    return [=](std::int32_t* data, const Rank& self) {
      return ncclBcast(data, 8, ncclInt32, root, self.comm, self.stream);
    };
  };
  const auto send = [](std::size_t count, ncclDataType_t type, int peer) {
    return [=](std::int32_t* data, const Rank& self) {
      return ncclSend(data, count, type, peer, self.comm, self.stream);
    };
  };
  const auto receive = [](std::size_t count, int peer) {
    return [=](std::int32_t* data, const Rank& self) {
      return ncclRecv(data, count, ncclInt32, peer, self.comm, self.stream);
    };
  };
  return {
      {"ncclAllReduce of 8 int32, sum", "ncclAllReduce of 9 int32, sum", reduce(8, ncclInt32, ncclSum),
       reduce(9, ncclInt32, ncclSum)},
      {"ncclAllReduce of 0 int32, sum", "ncclAllReduce of 9 int32, sum", reduce(0, ncclInt32, ncclSum),
       reduce(9, ncclInt32, ncclSum)},
      {"ncclAllReduce of 8 int32, sum", "ncclAllReduce of 8 float32, sum", reduce(8, ncclInt32, ncclSum),
       reduce(8, ncclFloat32, ncclSum)},
      {"ncclAllReduce of 8 int32, sum", "ncclAllReduce of 8 int32, max", reduce(8, ncclInt32, ncclSum),
       reduce(8, ncclInt32, ncclMax)},
      {"ncclAllReduce of 8 int32, sum", "ncclBroadcast of 8 int32, root 0", reduce(8, ncclInt32, ncclSum),
       broadcast(0)},
      {"ncclBroadcast of 8 int32, root 0", "ncclBroadcast of 8 int32, root 1", broadcast(0), broadcast(1)},
      {"ncclAllReduce of 8 int32, sum", "ncclSend of 8 int32", reduce(8, ncclInt32, ncclSum),
       send(8, ncclInt32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclSend of 7 int32", receive(8, 1), send(7, ncclInt32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclSend of 8 float32", receive(8, 1), send(8, ncclFloat32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclAllReduce of 8 int32, sum", receive(8, 1),
       reduce(8, ncclInt32, ncclSum)},
  };
}

TEST_P(PlayedNcclOrder, DifferentCallsAreToldByEveryRank) {
  for (const Mistake& mistake : mistakes()) {
    SCOPED_TRACE(std::string(mistake.of_0) + " and " + mistake.of_1);
    in_ranks(GetParam(), [&](Rank& self) {
      const Device<std::int32_t> data(Ints(16, 5));
      OK(ncclAllReduce(data.data(), data.data(), 1, ncclInt32, ncclSum, self.comm, self.stream));
      OK((self.rank == 1 ? mistake.call_1 : mistake.call_0)(data.data(), self));
      // The others of more ranks than two may be in the right, or wait for a message.
      EXPECT_EQ(await_trouble(self), ncclInvalidUsage);
      EXPECT_TRUE(contains(words(), "make different calls")) << words();
      if (self.ranks == 2) {
        EXPECT_TRUE(contains(words(), std::string("rank 1 is in ") + mistake.of_1)) << words();
        EXPECT_TRUE(contains(words(), std::string("rank 0 is in ") + mistake.of_0)) << words();
      }
      EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);  // nobody reads what was never written
      OK(ncclCommAbort(self.comm));
      CUDA_OK(cudaStreamSynchronize(self.stream));
    });
  }
}

// A rank that is killed, or hangs, keeps the others waiting, asleep, until they abort.
TEST_P(PlayedNcclOrder, AbortEndsWaitingForARankThatIsKilled) {
  const std::set<std::string> before = shared_files();
  in_ranks(
      GetParam(),
      [](Rank& self) {
        const Device<std::int32_t> data(Ints(kMany, 1));
        OK(ncclAllReduce(data.data(), data.data(), kMany, ncclInt32, ncclSum, self.comm, self.stream));
        CUDA_OK(cudaStreamSynchronize(self.stream));
        if (self.rank == 1) raise(SIGKILL);
        OK(ncclAllReduce(data.data(), data.data(), kMany, ncclInt32, ncclSum, self.comm, self.stream));
        OK(ncclAllReduce(data.data(), data.data(), 7, ncclInt32, ncclSum, self.comm, self.stream));
        std::thread watchdog([&] {
          rusage start, end;
          usleep(700'000);
          getrusage(RUSAGE_SELF, &start);
          usleep(1'000'000);
          getrusage(RUSAGE_SELF, &end);
          const auto us = [](const timeval& time) { return time.tv_sec * 1'000'000 + time.tv_usec; };
          EXPECT_LT(us(end.ru_utime) + us(end.ru_stime) - us(start.ru_utime) - us(start.ru_stime), 300'000);
          EXPECT_EQ(trouble(self), ncclSuccess);  // as with NCCL, nobody knows
          EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
          OK(ncclCommAbort(self.comm));
        });
        CUDA_OK(cudaStreamSynchronize(self.stream));
        watchdog.join();
        EXPECT_EQ(trouble(self), ncclRemoteError);
        EXPECT_TRUE(contains(words(), "aborted while it waited for rank")) << words();
        const Device<std::int32_t> later(Ints{3});
        EXPECT_EQ(later.read(self.stream), Ints{3});  // the stream goes on
        EXPECT_EQ(ncclAllReduce(later.data(), later.data(), 1, ncclInt32, ncclSum, self.comm, self.stream),
                  ncclInvalidUsage);
        EXPECT_EQ(ncclCommAbort(self.comm), ncclInvalidUsage);
      },
      1);
  EXPECT_EQ(shared_files(), before);
}

TEST(PlayedNccl, AbortEndsDestroyToo) {
  in_ranks(2, [](Rank& self) {
    if (self.rank == 1) return;  // hangs, as far as the other knows
    const Device<std::int32_t> data(Ints(4, 1));
    OK(ncclAllReduce(data.data(), data.data(), 4, ncclInt32, ncclSum, self.comm, self.stream));
    std::thread watchdog([&] {
      usleep(100'000);
      OK(ncclCommAbort(self.comm));
    });
    (void)ncclCommDestroy(self.comm);
    CUDA_OK(cudaStreamSynchronize(self.stream));
    watchdog.join();
    EXPECT_EQ(trouble(self), ncclRemoteError);
  });
}

// After a fault on the device its work is dropped. What waits for its turn must not wait for that.
TEST(PlayedNccl, ABrokenDeviceDoesNotHoldUpTheEnd) {
  in_ranks(1, [](Rank& self) {
    const Device<std::int32_t> data(Ints(4, 1));
    played_cuda_break(0, cudaErrorAssert);
    OK(ncclAllReduce(data.data(), data.data(), 4, ncclInt32, ncclSum, self.comm, self.stream));
    OK(ncclCommDestroy(self.comm));
  });
}

TEST_P(PlayedNcclOrder, ARankThatIsKilledBeforeAllHaveMetIsToldOf) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  const int ranks = GetParam();
  in_processes(
      ranks,
      [&](int rank) {
        ncclComm_t comm = nullptr;
        if (rank == 1) {
          (void)ncclGroupStart();
          (void)ncclCommInitRank(&comm, ranks, id, rank);  // joins, and would wait for the others later
          raise(SIGKILL);
        }
        if (rank > 1) return;  // never joins
        EXPECT_EQ(ncclCommInitRank(&comm, ranks, id, rank), ncclRemoteError);
        EXPECT_TRUE(contains(words(), "has ended")) << words();
      },
      1);
}

TEST(PlayedNccl, RanksOfOneDeviceAreRefused) {
  for (const bool shares : {false, true}) {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    in_processes(2, [&](int rank) {
      CUDA_OK(cudaSetDevice(1));
      if (shares) setenv("REEF_PLAYED_NCCL_SHARES_DEVICES", "1", 1);
      ncclComm_t comm = nullptr;
      EXPECT_EQ(ncclCommInitRank(&comm, 2, id, rank), shares ? ncclSuccess : ncclInvalidUsage);
      if (!shares) {
        EXPECT_TRUE(contains(words(), "Duplicate GPU detected : rank 0 and rank 1")) << words();
      }
    });
  }
}

TEST(PlayedNccl, WrongArgumentsAreRefusedWithWords) {
  in_ranks(2, [](Rank& self) {
    const Device<std::int32_t> data(Ints(4, 1));
    std::int32_t* const at = data.data();
    const auto refused = [&](ncclResult_t result, ncclResult_t as, const char* part) {
      EXPECT_EQ(result, as) << part;
      EXPECT_TRUE(contains(words(), part)) << words();
    };
    refused(ncclBcast(at, 4, ncclInt32, 2, self.comm, self.stream), ncclInvalidArgument,
            "rank 2 is not one of 2");
    refused(ncclSend(at, 4, ncclInt32, -1, self.comm, self.stream), ncclInvalidArgument,
            "rank -1 is not one of 2");
    refused(ncclAllReduce(at, at, 4, ncclNumTypes, ncclSum, self.comm, self.stream), ncclInvalidArgument,
            "no such type");
    refused(ncclAllReduce(at, at, 4, ncclInt32, static_cast<ncclRedOp_t>(9), self.comm, self.stream),
            ncclInvalidArgument, "no such op");
    refused(ncclAlltoAll(at, at, 2, ncclInt32, self.comm, self.stream), ncclInvalidArgument, "in place");
    refused(ncclSend(at, 4, ncclInt32, self.rank, self.comm, self.stream), ncclInvalidUsage, "to itself");
    refused(ncclGroupEnd(), ncclInvalidUsage, "without ncclGroupStart");
    refused(ncclCommSplit(self.comm, -7, 0, &self.comm, nullptr), ncclInvalidArgument, "not negative");
    refused(ncclCommSuspend(self.comm, 0), ncclInvalidUsage, "ncclCommSuspend is not played");
    ncclRedOp_t op = ncclSum;
    float factor = 2;
    OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, self.comm));
    refused(ncclAllReduce(at, at, 4, ncclInt32, op, self.comm, self.stream), ncclInvalidArgument,
            "another type");
    ncclUniqueId id{};
    ncclComm_t other = nullptr;
    refused(ncclCommInitRank(&other, 2, id, 2), ncclInvalidArgument, "rank 2 of 2");
    refused(ncclCommInitRank(&other, 2, id, 0), ncclInvalidUsage, "the process that made the unique id");
    OK(ncclGroupStart());
    refused(ncclBcast(at, 4, ncclInt32, 2, self.comm, self.stream), ncclInvalidArgument,
            "rank 2 is not one of 2");
    OK(ncclAllReduce(at, at, 4, ncclInt32, ncclSum, self.comm, self.stream));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(data.read(self.stream), Ints(4, 1));  // nothing of the group was done
    end_well(self);
    refused(ncclAllReduce(at, at, 4, ncclInt32, ncclSum, self.comm, self.stream), ncclInvalidUsage,
            "has been destroyed");
    refused(ncclCommDestroy(self.comm), ncclInvalidUsage, "has been destroyed");
    refused(ncclCommDestroy(reinterpret_cast<ncclComm_t>(&self)), ncclInvalidArgument,
            "no such communicator");
  });
}

TEST(PlayedNccl, NoCommunicatorIsEndedAsWell) {
  OK(ncclCommFinalize(nullptr));
  OK(ncclCommDestroy(nullptr));
  OK(ncclCommAbort(nullptr));
}

TEST(PlayedNccl, AUniqueIdIsJoinedOnceByEachOfItsRanks) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr, other = nullptr;
    OK(ncclGroupStart());
    OK(ncclCommInitRank(&comm, 2, id, 0));
    EXPECT_EQ(ncclCommInitRank(&other, 2, id, 0), ncclInvalidUsage);
    EXPECT_TRUE(contains(words(), "has joined as this rank")) << words();
    EXPECT_EQ(ncclCommInitRank(&other, 3, id, 1), ncclInvalidUsage);
    EXPECT_TRUE(contains(words(), "one of 2 ranks")) << words();
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  });
}

}  // namespace
}  // namespace reef::played
