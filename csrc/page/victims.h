#pragma once

#include <boost/intrusive/list.hpp>
#include <cstdint>
#include <vector>

#include "page/page.h"

namespace reef {

/// The pages that may leave, and which of them does so first. Not thread-safe. A page that is used again goes
/// to the end of a list, at no cost that depends on their number; a heap by next use is brought up to date
/// only when a page must leave: O(log n) for each that was used since.
class Victims {
 public:
  /// It was used last of all.
  void add(Page& page);
  void remove(Page& page);
  /// Its next use has become another; if it is there, it stays where it is by last use.
  void changed(Page& page);
  static bool has(const Page& page) { return page.order.is_linked(); }
  bool empty() const { return order_.empty(); }

  /// nullptr if there is none. Where next uses are known the farthest, and else, and between equals, the page
  /// unused for longest: what the step does not know it will not use. `epoch` is the learner's.
  Page* first(bool known, std::uint64_t epoch);

  /// Calls `visit` with pages, the last used first, until it returns true.
  template <class Visit>
  void from_last(const Visit& visit) {
    for (auto page = order_.rbegin(); page != order_.rend(); ++page) {
      if (visit(*page)) return;
    }
  }

 private:
  struct Entry {
    std::uint64_t next_use;
    std::uint64_t last_use;
    PagePtr page;
    bool operator<(const Entry& other) const {
      return next_use != other.next_use ? next_use < other.next_use : last_use > other.last_use;
    }
  };
  using Order = boost::intrusive::list<
      Page, boost::intrusive::member_hook<Page, boost::intrusive::list_member_hook<>, &Page::order>>;

  void take_up();
  void push(Page& page);

  Order order_;                         ///< by last use
  Order::iterator new_ = order_.end();  ///< from here on the heap does not have them
  std::vector<Entry> heap_;             ///< and pages that are no longer there, or were used since
  std::uint64_t epoch_ = 0;
};

}  // namespace reef
