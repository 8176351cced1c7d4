// Tests the errors of played NCCL: for what NCCL refuses, for what it leaves undefined, and for what it would
// wait for forever, until it is aborted.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/runtime/nccl_ranks.h"

namespace reef::played {
namespace {

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

class PlayedNcclTrouble : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PlayedNcclTrouble, testing::Values(2, 3, 4));

// Different calls of ranks 0 and 1 in the same position of their communicator, where the calls should be the
// same.
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
  const auto reduce_to = [](int root) {
    return [=](std::int32_t* data, const Rank& self) {
      return ncclReduce(data, data, 8, ncclInt32, ncclSum, root, self.comm, self.stream);
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
      {"ncclReduce of 8 int32, sum, root 0", "ncclReduce of 8 int32, sum, root 1", reduce_to(0),
       reduce_to(1)},
      {"ncclBroadcast of 8 int32, root 0", "ncclBroadcast of 8 int32, root 1", broadcast(0), broadcast(1)},
      {"ncclAllReduce of 8 int32, sum", "ncclSend of 8 int32", reduce(8, ncclInt32, ncclSum),
       send(8, ncclInt32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclSend of 7 int32", receive(8, 1), send(7, ncclInt32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclSend of 8 float32", receive(8, 1), send(8, ncclFloat32, 0)},
      {"ncclRecv of 8 int32, from rank 1", "ncclAllReduce of 8 int32, sum", receive(8, 1),
       reduce(8, ncclInt32, ncclSum)},
  };
}

TEST_P(PlayedNcclTrouble, DifferentCallsAreToldByEveryRank) {
  for (const Mistake& mistake : mistakes()) {
    SCOPED_TRACE(std::string(mistake.of_0) + " and " + mistake.of_1);
    in_ranks(GetParam(), [&](Rank& self) {
      const Device<std::int32_t> data(Ints(16, 5));
      NCCL_OK(ncclAllReduce(data.data(), data.data(), 1, ncclInt32, ncclSum, self.comm, self.stream));
      NCCL_OK((self.rank == 1 ? mistake.call_1 : mistake.call_0)(data.data(), self));
      // With more than two ranks, the others may make either call, so their words are not checked further.
      EXPECT_EQ(await_trouble(self), ncclInvalidUsage);
      EXPECT_TRUE(contains(words(), "make different calls")) << words();
      if (self.ranks == 2) {
        EXPECT_TRUE(contains(words(), std::string("rank 1 is in ") + mistake.of_1)) << words();
        EXPECT_TRUE(contains(words(), std::string("rank 0 is in ") + mistake.of_0)) << words();
      }
      // The stream does not go on, so that nothing reads memory that was never written.
      EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
      NCCL_OK(ncclCommAbort(self.comm));
      CUDA_OK(cudaStreamSynchronize(self.stream));
    });
  }
}

// If a rank is killed or hangs, the others sleep until they abort.
TEST_P(PlayedNcclTrouble, AbortEndsWaitingForARankThatIsKilled) {
  const std::set<std::string> before = shared_files();
  in_ranks(
      GetParam(),
      [](Rank& self) {
        const Device<std::int32_t> data(Ints(kMany, 1));
        NCCL_OK(ncclAllReduce(data.data(), data.data(), kMany, ncclInt32, ncclSum, self.comm, self.stream));
        CUDA_OK(cudaStreamSynchronize(self.stream));
        if (self.rank == 1) raise(SIGKILL);
        NCCL_OK(ncclAllReduce(data.data(), data.data(), kMany, ncclInt32, ncclSum, self.comm, self.stream));
        NCCL_OK(ncclAllReduce(data.data(), data.data(), 7, ncclInt32, ncclSum, self.comm, self.stream));
        std::thread watchdog([&] {
          rusage start, end;
          usleep(700'000);
          getrusage(RUSAGE_SELF, &start);
          usleep(1'000'000);
          getrusage(RUSAGE_SELF, &end);
          const auto us = [](const timeval& time) { return time.tv_sec * 1'000'000 + time.tv_usec; };
          EXPECT_LT(us(end.ru_utime) + us(end.ru_stime) - us(start.ru_utime) - us(start.ru_stime), 300'000);
          EXPECT_EQ(trouble(self), ncclSuccess);  // As in NCCL, the killed rank is not noticed.
          EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
          NCCL_OK(ncclCommAbort(self.comm));
        });
        CUDA_OK(cudaStreamSynchronize(self.stream));
        watchdog.join();
        EXPECT_EQ(trouble(self), ncclRemoteError);
        EXPECT_TRUE(contains(words(), "aborted while it waited for rank")) << words();
        const Device<std::int32_t> later(Ints{3});
        EXPECT_EQ(later.read(self.stream), Ints{3});  // The stream still works.
        EXPECT_EQ(ncclAllReduce(later.data(), later.data(), 1, ncclInt32, ncclSum, self.comm, self.stream),
                  ncclInvalidUsage);
        EXPECT_EQ(ncclCommAbort(self.comm), ncclInvalidUsage);
      },
      1);
  EXPECT_EQ(shared_files(), before);
}

TEST(PlayedNcclAlone, AbortEndsDestroyToo) {
  in_ranks(2, [](Rank& self) {
    if (self.rank == 1) return;  // To the other rank, this looks like a hang.
    const Device<std::int32_t> data(Ints(4, 1));
    NCCL_OK(ncclAllReduce(data.data(), data.data(), 4, ncclInt32, ncclSum, self.comm, self.stream));
    std::thread watchdog([&] {
      usleep(100'000);
      NCCL_OK(ncclCommAbort(self.comm));
    });
    (void)ncclCommDestroy(self.comm);
    CUDA_OK(cudaStreamSynchronize(self.stream));
    watchdog.join();
    EXPECT_EQ(trouble(self), ncclRemoteError);
  });
}

// After a fault on a device its work is dropped. Ending a communicator must not wait for dropped calls.
TEST(PlayedNcclAlone, ABrokenDeviceDoesNotHoldUpTheEnd) {
  in_ranks(1, [](Rank& self) {
    const Device<std::int32_t> data(Ints(4, 1));
    played_cuda_break(0, cudaErrorAssert);
    NCCL_OK(ncclAllReduce(data.data(), data.data(), 4, ncclInt32, ncclSum, self.comm, self.stream));
    NCCL_OK(ncclCommDestroy(self.comm));
  });
}

TEST_P(PlayedNcclTrouble, ARankThatIsKilledBeforeAllHaveMetIsToldOf) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  const int ranks = GetParam();
  in_processes(
      ranks,
      [&](int rank) {
        ncclComm_t comm = nullptr;
        if (rank == 1) {
          (void)ncclGroupStart();
          (void)ncclCommInitRank(&comm, ranks, id, rank);  // Joins; only the group's end would wait.
          raise(SIGKILL);
        }
        if (rank > 1) return;  // Never joins.
        EXPECT_EQ(ncclCommInitRank(&comm, ranks, id, rank), ncclRemoteError);
        EXPECT_TRUE(contains(words(), "has ended")) << words();
      },
      1);
}

// A rank that has met all others may end before they check for it again, which must not be an error.
TEST_P(PlayedNcclTrouble, RanksThatEndAtOnceHaveMet) {
  for (int round = 0; round < 50; ++round) in_ranks(GetParam(), [](Rank&) {});
}

TEST(PlayedNcclAlone, RanksOfOneDeviceAreRefused) {
  for (const bool shares : {false, true}) {
    ncclUniqueId id;
    NCCL_OK(ncclGetUniqueId(&id));
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

TEST(PlayedNcclAlone, WrongArgumentsAreRefusedWithWords) {
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
    NCCL_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, self.comm));
    refused(ncclAllReduce(at, at, 4, ncclInt32, op, self.comm, self.stream), ncclInvalidArgument,
            "another type");
    ncclUniqueId id{};
    ncclComm_t other = nullptr;
    refused(ncclCommInitRank(&other, 2, id, 2), ncclInvalidArgument, "rank 2 of 2");
    refused(ncclCommInitRank(&other, 2, id, 0), ncclInvalidUsage, "the process that made the unique id");
    NCCL_OK(ncclGroupStart());
    refused(ncclBcast(at, 4, ncclInt32, 2, self.comm, self.stream), ncclInvalidArgument,
            "rank 2 is not one of 2");
    NCCL_OK(ncclAllReduce(at, at, 4, ncclInt32, ncclSum, self.comm, self.stream));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(data.read(self.stream), Ints(4, 1));  // No call of the group has run.
    end_well(self);
    refused(ncclAllReduce(at, at, 4, ncclInt32, ncclSum, self.comm, self.stream), ncclInvalidUsage,
            "has been destroyed");
    refused(ncclCommDestroy(self.comm), ncclInvalidUsage, "has been destroyed");
    refused(ncclCommDestroy(reinterpret_cast<ncclComm_t>(&self)), ncclInvalidArgument,
            "no such communicator");
  });
}

TEST(PlayedNcclAlone, NoCommunicatorIsEndedAsWell) {
  NCCL_OK(ncclCommFinalize(nullptr));
  NCCL_OK(ncclCommDestroy(nullptr));
  NCCL_OK(ncclCommAbort(nullptr));
}

TEST(PlayedNcclAlone, AUniqueIdIsJoinedOnceByEachOfItsRanks) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    NCCL_OK(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr, other = nullptr;
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclCommInitRank(&comm, 2, id, 0));
    EXPECT_EQ(ncclCommInitRank(&other, 2, id, 0), ncclInvalidUsage);
    EXPECT_TRUE(contains(words(), "has joined as this rank")) << words();
    EXPECT_EQ(ncclCommInitRank(&other, 3, id, 1), ncclInvalidUsage);
    EXPECT_TRUE(contains(words(), "one of 2 ranks")) << words();
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  });
}

}  // namespace
}  // namespace reef::played
