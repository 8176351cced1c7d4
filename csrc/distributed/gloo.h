#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>

#include "deadline.h"
#include "distributed/store.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace reef {

/// Which network gloo listens on.
struct GlooNetwork {
  std::string interface;     ///< by name; several separated by commas; "" leaves it to the next
  bool one_machine = false;  ///< all ranks share this machine: loopback will do
};

/// gloo's collectives for CPU tensors, connected to all other ranks; each of them, each message between two
/// ranks, and the connecting has `timeout`. Throws ConfigError if the network cannot be used (it names the
/// interfaces there are), and gloo's own error if the others cannot be reached.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const StorePtr& store, int rank, int world_size,
                                                    const GlooNetwork& network, milliseconds timeout);

/// The same on the network of `other`, and with its timeout: its listener and its loop serve both.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const StorePtr& store, int rank, int world_size,
                                                    c10d::Backend& other);

/// Of each of its collectives. `backend` must be gloo's, as its name says.
milliseconds timeout_of_gloo(c10d::Backend& backend);

}  // namespace reef
