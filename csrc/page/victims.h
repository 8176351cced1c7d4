#pragma once

#include <boost/intrusive/list.hpp>
#include <cstdint>
#include <vector>

#include "page/page.h"

namespace reef {

/// The pages that may leave, and the order in which they should. Not thread-safe. A page that is used again
/// moves to the end of a list in O(1); a heap by next use is updated only when a page must leave, in O(log n)
/// for each page that was used since.
class Victims {
 public:
  /// Notes that the page was used just now.
  void add(Page& page);
  void remove(Page& page);
  /// Notes that the page's next use has changed. Its position by last use does not change.
  void changed(Page& page);
  static bool has(const Page& page) { return page.order.is_linked(); }
  bool empty() const { return order_.empty(); }

  /// Returns the page that should leave first, or nullptr if there is none. If next uses are known, this is
  /// the page with the farthest next use; otherwise, and among equals, it is the least recently used page. A
  /// page that the step does not know counts as never used again. `epoch` is the learner's.
  Page* first(bool known, std::uint64_t epoch);

  /// Calls `visit` with pages, most recently used first, until it returns true.
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
  Order::iterator new_ = order_.end();  ///< the first page that is not in the heap yet
  std::vector<Entry> heap_;             ///< may contain pages that were removed, or were used since
  std::uint64_t epoch_ = 0;
};

}  // namespace reef
