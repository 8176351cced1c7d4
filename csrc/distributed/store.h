#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>

#include "deadline.h"
#include "reef/rendezvous.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace reef {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// "tcp://host:port" or "file:///path", as in ProcessGroupOptions::store.
std::string address_text(const Rendezvous& rendezvous);

/// Opens the port or the file where the ranks meet, or connects to it, until `deadline`; waits for no other
/// rank but the one that serves. Throws ProcessGroupError that names rank, host and port, or the file, and
/// says `timeout`, of which `deadline` is the end: some of it may be over when this is called.
StorePtr open_store(const Rendezvous& rendezvous, milliseconds timeout, Deadline deadline);

}  // namespace reef
