#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "reef/link.h"

namespace reef {

/// Messages between ranks on a Link, one event after another. A rank sends one at a time and receives one at
/// a time. A message begins when its sender and its receiver have come to it and the ports are free, those
/// that could begin at the same moment in the order in which they were added.
class MessageSimulation {
 public:
  MessageSimulation(int ranks, const Link& link)
      : link_(link), ranks_(static_cast<std::size_t>(ranks)), sent_bytes_(ranks_.size(), 0) {}

  /// After `before`: what has come to a rank must be there, what it sends must have left. Gives its number.
  std::size_t add(int from, int to, std::int64_t bytes, std::set<std::size_t> before) {
    messages_.push_back({from, to, bytes, std::move(before)});
    sent_bytes_[static_cast<std::size_t>(from)] += bytes;
    return messages_.size() - 1;
  }

  /// The same, where ranks wait for all messages of a round of theirs before the next.
  void add(int from, int to, std::int64_t bytes) {
    std::set<std::size_t> before = rank(from).before;
    before.insert(rank(to).before.begin(), rank(to).before.end());
    const std::size_t number = add(from, to, bytes, std::move(before));
    rank(from).now.insert(number);
    rank(to).now.insert(number);
  }
  void end_round(int of) {
    if (!rank(of).now.empty()) rank(of).before = std::exchange(rank(of).now, {});
  }
  void end_round() {
    for (std::size_t of = 0; of < ranks_.size(); ++of) end_round(static_cast<int>(of));
  }

  /// When the last is there.
  double seconds() {
    std::vector<bool> done(messages_.size(), false);
    double last = 0;
    for (std::size_t count = 0; count < messages_.size(); ++count) {
      std::size_t next = messages_.size();
      double begin = std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < messages_.size(); ++i) {
        if (done[i]) continue;
        if (const double earliest = earliest_begin(messages_[i], done); earliest < begin) {
          begin = earliest;
          next = i;
        }
      }
      Message& message = messages_[next];
      const double port = link_.message_seconds + static_cast<double>(message.bytes) / link_.bytes_per_second;
      message.left = begin + port;
      message.there = message.left + link_.latency_seconds;
      rank(message.from).send_free = message.left;
      rank(message.to).receive_free = message.there;
      done[next] = true;
      last = std::max(last, message.there);
    }
    return last;
  }

  std::int64_t most_sent() const { return *std::max_element(sent_bytes_.begin(), sent_bytes_.end()); }
  std::int64_t all_sent() const {
    std::int64_t sum = 0;
    for (const std::int64_t bytes : sent_bytes_) sum += bytes;
    return sum;
  }

 private:
  struct Message {
    int from, to;
    std::int64_t bytes;
    std::set<std::size_t> before;
    double left = 0, there = 0;
  };
  struct Rank {
    std::set<std::size_t> before, now;
    double send_free = 0, receive_free = 0;
  };
  Rank& rank(int number) { return ranks_[static_cast<std::size_t>(number)]; }

  // Infinity, while something is to come before it.
  double earliest_begin(const Message& message, const std::vector<bool>& done) {
    double begin =
        std::max(rank(message.from).send_free, rank(message.to).receive_free - link_.latency_seconds);
    for (const std::size_t number : message.before) {
      if (!done[number]) return std::numeric_limits<double>::infinity();
      const Message& earlier = messages_[number];
      const bool came = earlier.to == message.from || earlier.to == message.to;
      begin = std::max(begin, came ? earlier.there : earlier.left);
    }
    return begin;
  }

  Link link_;
  std::vector<Rank> ranks_;
  std::vector<std::int64_t> sent_bytes_;
  std::vector<Message> messages_;
};

}  // namespace reef
