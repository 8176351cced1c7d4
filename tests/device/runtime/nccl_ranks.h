// Forks the ranks of played communicators as processes of a test, and provides their device memory.
#pragma once

#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "device/runtime/played_cuda.h"

namespace reef::played {

constexpr unsigned kDeadlineSeconds = 900;  // Several times what a slow machine needs.

#define NCCL_OK(call) ASSERT_EQ(call, ncclSuccess) << ncclGetLastError(nullptr)
#define CUDA_OK(call) ASSERT_EQ(call, cudaSuccess)

/// Runs `of_rank` in `ranks` processes. Expects that `killed_rank` is killed and that all others succeed.
inline void in_processes(int ranks, const std::function<void(int)>& of_rank, int killed_rank = -1) {
  std::cout.flush();
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    ASSERT_GE(process, 0);
    if (process == 0) {
      alarm(kDeadlineSeconds);
      if (ranks > kDevices) setenv("REEF_PLAYED_NCCL_SHARES_DEVICES", "1", 1);
      cudaSetDevice(rank % kDevices);
      of_rank(rank);
      std::cout.flush();
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    processes.push_back(process);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(processes[rank], &status, 0), processes[rank]);
    if (rank == killed_rank)
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << rank;
    else
      EXPECT_EQ(status, 0) << "rank " << rank << " of " << ranks << " failed";
  }
}

/// The state of one rank in a test.
struct Rank {
  int rank = 0, ranks = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

/// Does the same with a communicator of all ranks. `of_rank` ends it, for example by end_well().
inline void in_ranks(int ranks, const std::function<void(Rank&)>& of_rank, int killed_rank = -1) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  in_processes(
      ranks,
      [&](int rank) {
        Rank self{rank, ranks};
        CUDA_OK(cudaStreamCreate(&self.stream));
        NCCL_OK(ncclCommInitRank(&self.comm, ranks, id, rank));
        of_rank(self);
      },
      killed_rank);
}

inline void end_well(Rank& self) {
  CUDA_OK(cudaStreamSynchronize(self.stream));
  ncclResult_t error = ncclInternalError;
  NCCL_OK(ncclCommGetAsyncError(self.comm, &error));
  EXPECT_EQ(error, ncclSuccess);
  NCCL_OK(ncclCommDestroy(self.comm));
}

/// An array in device memory.
template <class T>
class Device {
 public:
  explicit Device(std::size_t count) : count_(count) {
    if (count > 0 && cudaMalloc(&data_, count * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
  }
  explicit Device(const std::vector<T>& from) : Device(from.size()) { *this = from; }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  Device& operator=(const std::vector<T>& from) {
    cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice);
    return *this;
  }
  T* data() const { return static_cast<T*>(data_); }
  /// Waits for the stream and returns a copy of the array.
  std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> all(count_);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    if (count_ > 0) {
      EXPECT_EQ(cudaMemcpy(all.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    }
    return all;
  }

 private:
  std::size_t count_;
  void* data_ = nullptr;
};

using Ints = std::vector<std::int32_t>;
/// Returns numbers that are different in each rank.
inline Ints ints(int rank, std::size_t count) {
  Ints all(count);
  std::iota(all.begin(), all.end(), rank * 100'000);
  return all;
}
/// A number of elements that exceeds the mailbox between two ranks.
constexpr std::size_t kMany = 300'000;

}  // namespace reef::played
