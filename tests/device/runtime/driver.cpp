// The CUDA driver, libcuda.so.1, of played devices. LibTorch's library for run-time compilation links to a
// driver and asks it which devices are in use.
#define PLAYED extern "C" __attribute__((visibility("default"))) int

namespace {
constexpr int kSuccess = 0;
constexpr int kNotSupported = 801;
}  // namespace

PLAYED cuDeviceGet(int* device, int ordinal) { return *device = ordinal, kSuccess; }
PLAYED cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
PLAYED cuCtxGetCurrent(void** context) {
  static int played = 0;
  return *context = &played, kSuccess;
}
PLAYED cuCtxSetCurrent(void*) { return kSuccess; }
PLAYED cuDevicePrimaryCtxRetain(void** context, int) { return cuCtxGetCurrent(context); }
PLAYED cuGetErrorString(int, const char** text) {
  return *text = "not supported by a played device", kSuccess;
}

#define NOT_PLAYED(name) \
  PLAYED name() { return kNotSupported; }
NOT_PLAYED(cuDeviceGetAttribute)
NOT_PLAYED(cuFuncGetAttribute)
NOT_PLAYED(cuFuncSetAttribute)
NOT_PLAYED(cuFuncSetCacheConfig)
NOT_PLAYED(cuLaunchCooperativeKernel)
NOT_PLAYED(cuLaunchKernel)
NOT_PLAYED(cuLinkAddData_v2)
NOT_PLAYED(cuLinkComplete)
NOT_PLAYED(cuLinkCreate_v2)
NOT_PLAYED(cuModuleGetFunction)
NOT_PLAYED(cuModuleLoad)
NOT_PLAYED(cuModuleLoadData)
NOT_PLAYED(cuModuleLoadDataEx)
NOT_PLAYED(cuModuleUnload)
NOT_PLAYED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_PLAYED(cuPointerGetAttribute)
NOT_PLAYED(cuTensorMapEncodeTiled)
NOT_PLAYED(cuGetProcAddress_v2)
