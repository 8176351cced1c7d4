// The functions of NCCL that LibTorch imports but that are not played. They return an error; without them,
// the real library would be called with communicators that it does not know. They are defined without
// parameters, because they read none.
#include "device/runtime/nccl_unplayed.h"

#define REEF_UNPLAYED(function)                                      \
  extern "C" __attribute__((visibility("default"))) int function() { \
    return reef::played::refuse_unplayed(#function);                 \
  }

REEF_UNPLAYED(ncclCommGetUniqueId)
REEF_UNPLAYED(ncclCommGrow)
REEF_UNPLAYED(ncclCommMemStats)
REEF_UNPLAYED(ncclCommResume)
REEF_UNPLAYED(ncclCommRevoke)
REEF_UNPLAYED(ncclCommShrink)
REEF_UNPLAYED(ncclCommSuspend)
REEF_UNPLAYED(ncclCommWindowDeregister)
REEF_UNPLAYED(ncclCommWindowRegister)
REEF_UNPLAYED(ncclDevCommCreate)
REEF_UNPLAYED(ncclDevCommDestroy)
REEF_UNPLAYED(ncclGetLsaMultimemDevicePointer)
REEF_UNPLAYED(ncclGetPeerDevicePointer)
REEF_UNPLAYED(ncclGroupSimulateEnd)
REEF_UNPLAYED(ncclPutSignal)
REEF_UNPLAYED(ncclSignal)
REEF_UNPLAYED(ncclWaitSignal)
REEF_UNPLAYED(ncclWinGetUserPtr)
