// libplayed_nccl.so implements NCCL's functions for played devices. It is preloaded with the played CUDA
// runtime and replaces libnccl.so.2. Ranks are processes on one machine that communicate through shared
// memory. Results do not depend on timing. Use that NCCL leaves undefined is an error here, which every rank
// reports.
#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "device/runtime/nccl_group.h"

namespace reef::played {
namespace {

template <class T>
void give(T* to, T value) {
  if (to == nullptr) refuse("no place for the answer is given");
  *to = value;
}

ncclResult_t submit(ncclComm_t communicator, Call call, ncclRedOp_t op = ncclSum) {
  return in_group([&] {
    ncclComm& comm = opened(communicator);
    if (bytes_of(call.type) == 0) refuse("there is no such type of elements");
    if ((call.has_root() || !call.is_collective()) && (call.root < 0 || call.root >= comm.ranks()))
      refuse("rank " + std::to_string(call.root) + " is not one of " + std::to_string(comm.ranks()));
    if (call.reduces()) {
      if (!is_reduced(call.type)) refuse("reductions of float8 are not played");
      call.reduction = comm.reduction(op, call.type);
    }
    if (call.function == Function::kAllToAll && call.send == call.receive && call.count > 0 &&
        comm.ranks() > 1)
      refuse("ncclAlltoAll cannot be in place");
    add_call(communicator, call);
  });
}

static_assert(sizeof(SharedName) <= NCCL_UNIQUE_ID_BYTES);
ncclResult_t join(ncclComm_t* communicator, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  return in_group([&] {
    if (communicator == nullptr) refuse("no place for the communicator is given");
    if (config != nullptr && config->magic != NCCL_API_MAGIC)
      refuse("the config was not made by NCCL_CONFIG_INITIALIZER");
    if (ranks < 1 || ranks > Mailboxes::kMaxRanks || rank < 0 || rank >= ranks)
      refuse("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " cannot be: up to " +
             std::to_string(Mailboxes::kMaxRanks) + " ranks are played");
    SharedName name;
    std::memcpy(&name, id.internal, sizeof name);
    *communicator = make_communicator(name, ranks, rank, newcomer());
    add_meeting([joined = *communicator, name] {
      joined->meet();
      forget_shared_memory(name);
    });
  });
}

void split(ncclComm& comm, int color, int key, ncclComm_t* communicator) {
  Newcomer mine = comm.device();
  mine.color = color;
  mine.key = key;
  if (color != NCCL_SPLIT_NOCOLOR) mine.memory = make_shared_memory();
  const std::vector<Newcomer> all = comm.gather(mine);
  *communicator = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return;
  std::vector<int> members(all.size());
  std::iota(members.begin(), members.end(), 0);
  std::erase_if(members, [&](int rank) { return all[rank].color != color; });
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return all[a].key < all[b].key; });
  const auto at = std::find(members.begin(), members.end(), comm.rank()) - members.begin();
  *communicator = make_communicator(all[members.front()].memory, static_cast<int>(members.size()),
                                    static_cast<int>(at), comm.device());
  (*communicator)->meet();
  forget_shared_memory(mine.memory);
}

}  // namespace
}  // namespace reef::played

using namespace reef::played;

ncclResult_t ncclGetVersion(int* version) {
  return attempt([&] { give(version, NCCL_VERSION_CODE); });
}
const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kWords[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress",
                                    "operation timed out"};
  return result >= 0 && result < ncclNumResults ? kWords[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error(); }

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  return attempt([&] {
    if (cudaMalloc(memory, bytes) != cudaSuccess)
      refuse("no device memory for ncclMemAlloc", ncclUnhandledCudaError);
  });
}
ncclResult_t ncclMemFree(void* memory) {
  return attempt([&] {
    if (cudaFree(memory) != cudaSuccess) refuse("ncclMemFree of no such memory", ncclUnhandledCudaError);
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return attempt([&] {
    ncclUniqueId made{};
    const SharedName name = make_shared_memory();
    std::memcpy(made.internal, &name, sizeof name);
    give(id, made);
  });
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank) {
  return join(communicator, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return join(communicator, ranks, id, rank, config);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int ranks, int rank, int ids,
                                      ncclUniqueId* id, ncclConfig_t* config) {
  if (ids < 1 || id == nullptr) return attempt([] { refuse("no unique id is given"); });
  return join(communicator, ranks, id[0], rank, config);
}
ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int devices, const int* which) {
  return in_group([&] {
    ncclUniqueId id;
    int before = 0;
    if (ncclGetUniqueId(&id) != ncclSuccess || cudaGetDevice(&before) != cudaSuccess) return;
    for (int rank = 0; rank < devices; ++rank) {
      const int device = which != nullptr ? which[rank] : rank;
      if (cudaSetDevice(device) != cudaSuccess)
        refuse("there is no device " + std::to_string(device), ncclUnhandledCudaError);
      ncclCommInitRank(communicators + rank, devices, id, rank);
    }
    (void)cudaSetDevice(before);
  });
}
ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t* communicator, ncclConfig_t*) {
  return in_group([=] {
    ncclComm& comm = opened(from);
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) refuse("a color is not negative");
    give(communicator, ncclComm_t{});
    add_meeting([=, &comm] { split(comm, color, key, communicator); });
  });
}
// As in NCCL, a null communicator is accepted.
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  return communicator == nullptr ? ncclSuccess : attempt([&] { known(communicator).finalize(); });
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  return communicator == nullptr ? ncclSuccess : attempt([&] { known(communicator).destroy(); });
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  return communicator == nullptr ? ncclSuccess : attempt([&] { known(communicator).abort(); });
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  return attempt([&] { give(error, known(communicator).trouble()); });
}
ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  return attempt([&] { give(count, opened(communicator).ranks()); });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int* device) {
  return attempt([&] { give(device, opened(communicator).device().ordinal); });
}
ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  return attempt([&] { give(rank, opened(communicator).rank()); });
}

ncclResult_t ncclCommRegister(const ncclComm_t communicator, void* memory, size_t bytes, void** handle) {
  return attempt([&] {
    if (memory == nullptr || bytes == 0) refuse("there is no memory to register");
    give(handle, opened(communicator).register_memory());
  });
}
ncclResult_t ncclCommDeregister(const ncclComm_t communicator, void* handle) {
  return attempt([&] { known(communicator).deregister_memory(handle); });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t communicator) {
  return attempt([&] {
    ncclComm& comm = opened(communicator);
    if (!is_reduced(type)) refuse("sums of such elements are not played");
    Reduction reduction{kMultipliedSum};
    if (residence == ncclScalarDevice)
      reduction.device_factor = factor;
    else
      std::memcpy(reduction.factor.data(), factor, bytes_of(type));
    give(op, comm.make_op(type, reduction));
  });
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t communicator) {
  return attempt([&] { opened(communicator).destroy_op(op); });
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kAllReduce, type, count, 0, {}, send, receive, stream}, op);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kReduce, type, count, root, {}, send, receive, stream}, op);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kReduceScatter, type, count, 0, {}, send, receive, stream}, op);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kBroadcast, type, count, root, {}, send, receive, stream});
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kAllGather, type, count, 0, {}, send, receive, stream});
}
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kAllToAll, type, count, 0, {}, send, receive, stream});
}
ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kGather, type, count, root, {}, send, receive, stream});
}
ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                         ncclComm_t communicator, cudaStream_t stream) {
  return submit(communicator, {Function::kScatter, type, count, root, {}, send, receive, stream});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return submit(communicator, {Function::kSend, type, count, peer, {}, send, nullptr, stream});
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return submit(communicator, {Function::kRecv, type, count, peer, {}, nullptr, receive, stream});
}
ncclResult_t ncclGroupStart() {
  begin_group();
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return attempt(end_group); }
