#pragma once

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace reef {

/// False once gloo knows that the connection to `rank` is broken: by the end of that process, or an error.
/// Sends a few bytes that nobody reads.
bool is_connected(c10d::Backend& gloo, int rank);

/// As work.wait(), of a message to or from `rank`: false if it was aborted. Throws DistError within two
/// seconds of when the connection breaks. gloo by itself tells only who waits for a message of which nothing
/// has gone through: where a part of it has, the wait lasts until the group's timeout, since
/// Pair::signalException (gloo/transport/tcp/pair.cc) leaves out what is being written and read.
bool wait_connected(c10d::Work& work, c10d::Backend& gloo, int rank);

}  // namespace reef
