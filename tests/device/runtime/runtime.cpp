// The functions of libcudart, implemented with played memory and streams.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "device/runtime/memory.h"
#include "device/runtime/played_cuda.h"
#include "device/runtime/streams.h"

#define PLAYED extern "C" __attribute__((visibility("default")))

using namespace reef::played;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t of_current(cudaError_t otherwise = cudaSuccess) {
  const cudaError_t error = broken(current_device());
  return noted(error != cudaSuccess ? error : otherwise);
}
bool is_device(int device) { return device >= 0 && device < kDevices; }
Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }
Graph& graph_of(cudaGraph_t handle) { return *reinterpret_cast<Graph*>(handle); }

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, Stream& stream) {
  if (bytes == 0) return cudaSuccess;
  if (const cudaError_t error = broken(stream.device())) return error;
  const auto of_from = find_block(from);
  const auto of_to = find_block(to);
  const auto on_device = [](const std::optional<Block>& block) { return block && block->device >= 0; };
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (kind != cudaMemcpyDefault && (on_device(of_from) != from_device || on_device(of_to) != to_device))
    return cudaErrorInvalidValue;
  void* const written = reach(to);
  if (of_from) {
    const void* const read = reach(from);
    if (const auto error = stream.give({Work::kCopy, [=] { std::memcpy(written, read, bytes); }}))
      return error;
  } else {  // Pageable memory is read before the call returns.
    const auto* const begin = static_cast<const char*>(from);
    auto kept = std::make_shared<std::vector<char>>(begin, begin + bytes);
    if (const auto error = stream.give({Work::kCopy, [=] { std::memcpy(written, kept->data(), bytes); }}))
      return error;
  }
  return of_to ? cudaSuccess : stream.finish();  // Pageable memory is written before the call returns.
}

}  // namespace

void played_cuda_fail_allocations(int succeed, int fail) {
  for (int device = 0; device < kDevices; ++device) device_memory(device).refusals.set(succeed, fail);
}
void played_cuda_fail_host_allocations(int succeed, int fail) { host_memory().refusals.set(succeed, fail); }
void* played_cuda_plugged_allocate(std::ptrdiff_t bytes, int device, cudaStream_t) {
  return device_memory(device).allocate(static_cast<std::size_t>(bytes));
}
void played_cuda_plugged_free(void* data, std::ptrdiff_t, int device, cudaStream_t) {
  finish_device(device);
  device_memory(device).free(data);
}
std::size_t played_cuda_host_bytes() { return host_memory().bytes(); }

// ---- devices
PLAYED cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
PLAYED cudaError_t cudaGetDevice(int* device) { return *device = current_device(), cudaSuccess; }
PLAYED cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return noted(cudaErrorInvalidDevice);
  set_current_device(device);
  return of_current();
}
PLAYED cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
PLAYED cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
PLAYED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 3;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
PLAYED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) return noted(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "played device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->pciBusID = device + 1;
  properties->totalGlobalMem = DeviceMemory::kTotalBytes;
  properties->major = 9;
  properties->multiProcessorCount = 3;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = properties->sharedMemPerBlockOptin = 48 << 10;
  properties->regsPerBlock = 64 << 10;
  properties->unifiedAddressing = 1;
  std::fill_n(properties->maxThreadsDim, 3, 1024);
  std::fill_n(properties->maxGridSize, 3, 65535);
  properties->maxGridSize[0] = 0x7fffffff;
  return cudaSuccess;
}
PLAYED cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
PLAYED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
PLAYED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
PLAYED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return noted(cudaErrorInvalidDevice); }
PLAYED cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  finish_device(current_device());
  return of_current();
}
PLAYED cudaError_t cudaGetLastError() {
  const cudaError_t error = std::exchange(last_error, cudaSuccess);
  return error != cudaSuccess ? error : broken(current_device());
}
PLAYED cudaError_t cudaPeekAtLastError() {
  return last_error != cudaSuccess ? last_error : broken(current_device());
}

// ---- memory
PLAYED cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const DeviceMemory& memory = device_memory(current_device());
  *free = memory.free_bytes();
  *total = DeviceMemory::kTotalBytes;
  return of_current();
}
PLAYED cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  if (const cudaError_t error = of_current()) return error;
  *data = device_memory(current_device()).allocate(bytes);
  return *data != nullptr ? cudaSuccess : noted(cudaErrorMemoryAllocation);
}
PLAYED cudaError_t cudaFree(void* data) {
  if (data == nullptr) return of_current();
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  const auto block = find_block(data);
  if (!block || block->device < 0) return noted(cudaErrorInvalidValue);
  finish_device(block->device);
  return device_memory(block->device).free(data) ? of_current() : noted(cudaErrorInvalidValue);
}
PLAYED cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  *data = host_memory().allocate(bytes);
  return *data != nullptr ? of_current() : noted(cudaErrorMemoryAllocation);
}
PLAYED cudaError_t cudaMallocHost(void** data, std::size_t bytes) { return cudaHostAlloc(data, bytes, 0); }
PLAYED cudaError_t cudaFreeHost(void* data) {
  if (data == nullptr) return of_current();
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  for (int device = 0; device < kDevices; ++device) finish_device(device);
  return host_memory().free(data) ? of_current() : noted(cudaErrorInvalidValue);
}
PLAYED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  const auto block = find_block(data);
  if (!block) return cudaSuccess;
  attributes->type = block->device >= 0 ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = std::max(block->device, 0);
  attributes->devicePointer = const_cast<void*>(data);
  if (block->device < 0) attributes->hostPointer = const_cast<void*>(data);
  return cudaSuccess;
}
PLAYED cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return noted(copy(to, from, bytes, kind, stream_of(stream)));
}
PLAYED cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  if (const cudaError_t error = noted(copy(to, from, bytes, kind, stream_of(nullptr)))) return error;
  return noted(stream_of(nullptr).finish());
}
PLAYED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                       cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
PLAYED cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!find_block(to)) return noted(cudaErrorInvalidValue);
  return noted(
      stream_of(stream).give({Work::kKernel, [=, at = reach(to)] { std::memset(at, value, bytes); }}));
}
PLAYED cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ---- streams and events
PLAYED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  *stream =
      reinterpret_cast<cudaStream_t>(new_stream(current_device(), (flags & cudaStreamNonBlocking) == 0));
  return of_current();
}
PLAYED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
PLAYED cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
PLAYED cudaError_t cudaStreamDestroy(cudaStream_t) { return of_current(); }  // It still does its work.
PLAYED cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return noted(stream_of(stream).finish()); }
PLAYED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = refuse_while_capturing()) return noted(error);
  if (const cudaError_t error = broken(stream_of(stream).device())) return noted(error);
  return stream_of(stream).finished() ? cudaSuccess : noted(cudaErrorNotReady);
}
PLAYED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
PLAYED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return noted(event_of(event).hold_back(stream_of(stream)));
}
PLAYED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* with,
                                         unsigned) {
  return noted(stream_of(stream).give({Work::kKernel, [=] { callback(stream, cudaSuccess, with); }}));
}
PLAYED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* with) {
  return noted(stream_of(stream).give({Work::kKernel, [=] { function(with); }}));
}
PLAYED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event(current_device()));
  return of_current();
}
PLAYED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
PLAYED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return of_current();
}
PLAYED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  if (const cudaError_t error = broken(stream_of(stream).device())) return noted(error);
  return noted(event_of(event).record(stream_of(stream)));
}
PLAYED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
PLAYED cudaError_t cudaEventQuery(cudaEvent_t event) { return noted(event_of(event).query()); }
PLAYED cudaError_t cudaEventSynchronize(cudaEvent_t event) { return noted(event_of(event).wait()); }
PLAYED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return noted(Event::milliseconds(event_of(from), event_of(to), milliseconds));
}

// ---- graphs
PLAYED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return noted(begin_capture(stream_of(stream), mode));
}
PLAYED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Graph* captured = nullptr;
  const cudaError_t error = end_capture(stream_of(stream), &captured);
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  return noted(error);
}
PLAYED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const auto capture = capture_of(stream_of(stream));
  *status = !capture          ? cudaStreamCaptureStatusNone
            : capture->spoilt ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
PLAYED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* number, cudaGraph_t* graph,
                                            const cudaGraphNode_t** needed, const cudaGraphEdgeData** edges,
                                            std::size_t* count) {
  const auto capture = capture_of(stream_of(stream));
  if (number != nullptr) *number = capture ? capture->number : 0;
  if (graph != nullptr) *graph = nullptr;
  if (needed != nullptr) *needed = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
PLAYED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = exchange_capture_mode(*mode);
  return cudaSuccess;
}
PLAYED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = graph_of(graph).tasks.size();
  return cudaSuccess;
}
PLAYED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph,
                                                 unsigned long long) {
  *instance = reinterpret_cast<cudaGraphExec_t>(new Graph(graph_of(graph)));
  return of_current();
}
PLAYED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph,
                                        unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(instance, graph, flags);
}
PLAYED cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  for (const Task& task : reinterpret_cast<Graph*>(instance)->tasks)
    if (const cudaError_t error = stream_of(stream).give(task)) return noted(error);
  return of_current();
}
PLAYED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}
PLAYED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  delete reinterpret_cast<Graph*>(instance);  // Launched graphs have copies of the tasks.
  return cudaSuccess;
}

// ---- kernels: played operators replace those of LibTorch, and played kernels those of Reef. The kernel of
// torch.cuda._sleep, which only takes time, is the only one that can be launched here.
namespace {
std::atomic<const void*> sleeping_kernel{nullptr};
constexpr std::int64_t kCyclesPerMicrosecond = 2000;
}  // namespace
PLAYED void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
PLAYED void __cudaRegisterFatBinaryEnd(void**) {}
PLAYED void __cudaUnregisterFatBinary(void**) {}
PLAYED void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*,
                                   void*, void*, int*) {
  if (std::strstr(name, "spin_kernel") != nullptr) sleeping_kernel = function;
}
PLAYED void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
PLAYED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
PLAYED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, std::size_t,
                                    cudaStream_t stream) {
  if (kernel != sleeping_kernel) {
    std::fprintf(stderr, "played device: a kernel that is not played was launched\n");
    return noted(cudaErrorNotSupported);
  }
  const std::chrono::microseconds time(*static_cast<std::int64_t*>(arguments[0]) / kCyclesPerMicrosecond);
  return noted(stream_of(stream).give({Work::kKernel, [time] { std::this_thread::sleep_for(time); }}));
}
PLAYED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                      std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
PLAYED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  return *blocks = 1, cudaSuccess;
}
PLAYED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                          std::size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
PLAYED cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- functions that are not played: they report an error, so that no call reaches the real runtime
namespace {
cudaError_t not_played(const char* name) {
  std::fprintf(stderr, "played device: %s is not played\n", name);
  return noted(cudaErrorNotSupported);
}
}  // namespace
#define NOT_PLAYED(name)                                                                            \
  extern "C" __attribute__((visibility("default"))) cudaError_t played_not_##name() __asm__(#name); \
  cudaError_t played_not_##name() { return not_played(#name); }
NOT_PLAYED(cudaLaunchKernelExC)
NOT_PLAYED(cudaDeviceGetDefaultMemPool)
NOT_PLAYED(cudaDeviceGetGraphMemAttribute)
NOT_PLAYED(cudaDeviceSetGraphMemAttribute)
NOT_PLAYED(cudaFreeAsync)
NOT_PLAYED(cudaFuncGetAttributes)
NOT_PLAYED(cudaFuncSetAttribute)
NOT_PLAYED(cudaGetSymbolAddress)
NOT_PLAYED(cudaGraphAddNode)
NOT_PLAYED(cudaGraphConditionalHandleCreate)
NOT_PLAYED(cudaGraphNodeGetDependencies)
NOT_PLAYED(cudaGraphRetainUserObject)
NOT_PLAYED(cudaHostRegister)
NOT_PLAYED(cudaHostUnregister)
NOT_PLAYED(cudaIpcCloseMemHandle)
NOT_PLAYED(cudaIpcGetEventHandle)
NOT_PLAYED(cudaIpcGetMemHandle)
NOT_PLAYED(cudaIpcOpenEventHandle)
NOT_PLAYED(cudaIpcOpenMemHandle)
NOT_PLAYED(cudaKernelSetAttributeForDevice)
NOT_PLAYED(cudaLibraryGetGlobal)
NOT_PLAYED(cudaLibraryGetKernel)
NOT_PLAYED(cudaLibraryGetKernelCount)
NOT_PLAYED(cudaLibraryGetManaged)
NOT_PLAYED(cudaLibraryGetUnifiedFunction)
NOT_PLAYED(cudaLibraryLoadData)
NOT_PLAYED(cudaLibraryLoadFromFile)
NOT_PLAYED(cudaLibraryUnload)
NOT_PLAYED(cudaMallocAsync)
NOT_PLAYED(cudaMallocManaged)
NOT_PLAYED(cudaMemPoolGetAttribute)
NOT_PLAYED(cudaMemPoolSetAccess)
NOT_PLAYED(cudaMemPoolSetAttribute)
NOT_PLAYED(cudaMemPoolTrimTo)
NOT_PLAYED(cudaMemcpyToSymbol)
NOT_PLAYED(cudaProfilerStart)
NOT_PLAYED(cudaProfilerStop)
NOT_PLAYED(cudaStreamBeginCaptureToGraph)
NOT_PLAYED(cudaStreamUpdateCaptureDependencies)
NOT_PLAYED(cudaUserObjectCreate)
NOT_PLAYED(cudaUserObjectRelease)
