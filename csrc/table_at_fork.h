#pragma once

#include <mutex>

#include "fork.h"

namespace reef {

/// A table of the whole process, behind a lock that a fork finds at rest. Make it by `new`, once, and never
/// destroy it: destructors of statics use it, too.
template <class Table>
class TableAtFork {
 public:
  /// The table, which nobody else has while this lives.
  class Locked {
   public:
    Locked(std::mutex& mutex, Table& table) : lock_(mutex), table_(table) {}
    Table* operator->() const { return &table_; }
    Table& operator*() const { return table_; }

   private:
    std::unique_lock<std::mutex> lock_;
    Table& table_;
  };
  Locked lock() { return {mutex_, table_}; }

 private:
  MutexAtFork mutex_{AtFork::Order::kTables};
  Table table_;
};

}  // namespace reef
