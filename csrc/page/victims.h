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
  /// Notes that the page was used just now.
  void add(Page& page);
  void remove(Page& page);
  /// Notes that the page's next use has changed. Its place by last use stays.
  void changed(Page& page);
  static bool has(const Page& page) { return page.order.is_linked(); }
  bool empty() const { return order_.empty(); }

  /// Returns the page that should leave first, or nullptr: the one whose next use is farthest, if next uses
  /// are known, and else, and among equals, the one that has been unused for longest. A page that the step
  /// does not know counts as never used again. `epoch` is the learner's.
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
  Order::iterator new_ = order_.end();  ///< the first page that the heap does not have yet
  std::vector<Entry> heap_;             ///< may have pages that are not there any longer, or were used since
  std::uint64_t epoch_ = 0;
};

}  // namespace reef
