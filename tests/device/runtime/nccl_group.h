// Groups of calls: what a thread calls between ncclGroupStart and ncclGroupEnd begins together. A call
// outside is a group of its own.
#pragma once

#include <nccl.h>

#include <functional>
#include <string>

#include "device/runtime/nccl_call.h"
#include "device/runtime/nccl_communicator.h"

namespace reef::played {

[[noreturn]] void refuse(const std::string& words, ncclResult_t result = ncclInvalidArgument);

/// Runs a function of NCCL. Returns how it is refused, with the words for ncclGetLastError. A group that this
/// thread is in is refused then, too.
ncclResult_t attempt(const std::function<void()>& act);

void begin_group();
void end_group();
/// Attempts `act` within a group.
ncclResult_t in_group(const std::function<void()>& act);

/// Adds a call to the group. Calls of one communicator are issued in order, but first the collectives, and
/// then all sends and receives as one work, in which each moves when it can.
void add_call(ncclComm_t communicator, const Call& call);
/// Adds what waits for other ranks that may be called by this thread in the same group.
void add_meeting(std::function<void()> meeting);

/// Makes a communicator that its functions know by its address.
ncclComm_t make_communicator(const SharedName& name, int ranks, int rank, const Newcomer& as);
/// Throws Refusal if there never was such a communicator.
ncclComm& known(ncclComm_t communicator);
/// Throws Refusal if it has ended, too.
ncclComm& opened(ncclComm_t communicator);

}  // namespace reef::played
