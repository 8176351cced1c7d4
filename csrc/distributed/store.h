#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// Gives a key's value, or nothing if the key is not there, and waits for nothing. After check(), get() would
/// wait for a key that another rank has deleted since: as long as the store's timeout, and with the lock that
/// all calls of the store need.
std::optional<std::vector<std::uint8_t>> value_of(c10d::Store& store, const std::string& key);

}  // namespace reef
