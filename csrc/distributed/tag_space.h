#pragma once

namespace reef {

/// How the tags of the messages in one group are divided: two messages between the same ranks that are under
/// way at once, and are not of one sequence, have different tags.
struct TagSpace {
  static constexpr int kExchanges = 1 << 28;  ///< below it are the program's own messages through c10d
  static constexpr int kPerNumber = 1 << 20;  ///< of each exchange
  static constexpr int kNumbers = 1536;       ///< of exchanges
  static constexpr int kAgreement = 0;        ///< the number of the exchange by which ranks agree
  static constexpr int kFirstFree = 1;        ///< the numbers from here on are given out
  static constexpr int kMessages = kExchanges + kNumbers * kPerNumber;  ///< of reef::send and reef::receive
  static constexpr int kNeverSent = kMessages + kPerNumber;             ///< of what nobody sends
};

}  // namespace reef
