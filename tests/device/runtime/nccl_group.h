// Groups of calls: the calls of a thread between ncclGroupStart and ncclGroupEnd begin together. A call
// outside of a group is a group of its own.
#pragma once

#include <nccl.h>

#include <functional>
#include <string>

#include "device/runtime/nccl_call.h"
#include "device/runtime/nccl_communicator.h"

namespace reef::played {

[[noreturn]] void refuse(const std::string& words, ncclResult_t result = ncclInvalidArgument);

/// Runs the body of a function of NCCL and returns its result. A Refusal becomes an error result, its words
/// become the last error, and the group that this thread is in fails too.
ncclResult_t attempt(const std::function<void()>& act);

void begin_group();
void end_group();
/// Attempts `act` within a group.
ncclResult_t in_group(const std::function<void()>& act);

/// Adds a call to the group. When the group ends, the collectives of a communicator are issued in order, and
/// then all its sends and receives together, each of which proceeds when it can.
void add_call(ncclComm_t communicator, const Call& call);
/// Adds a function that waits for other ranks, which may be ranks of this thread in the same group.
void add_meeting(std::function<void()> meeting);

/// Makes a communicator that known() finds by its address.
ncclComm_t make_communicator(const SharedName& name, int ranks, int rank, const Newcomer& as);
/// Returns a communicator. Throws Refusal if there never was one at this address.
ncclComm& known(ncclComm_t communicator);
/// Does the same, but also throws Refusal if the communicator has ended.
ncclComm& opened(ncclComm_t communicator);

}  // namespace reef::played
