#pragma once

// Boost.JSON without its library: json_members.cpp holds it, and the library exports nothing of it.
#include <boost/config.hpp>
#undef BOOST_SYMBOL_VISIBLE
#define BOOST_SYMBOL_VISIBLE
#include <boost/json.hpp>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "reef/error.h"

namespace reef {

/// Parses `text`, of a type named `what`. Throws ConfigError if it is no JSON.
boost::json::value parsed_json(std::string_view text, const char* what);

/// Returns what `value` reads. If that fails, throws ConfigError, which names the member: what Boost.JSON
/// says of a member that is missing, or of another kind, does not.
template <class Read>
auto read_member(const char* what, const char* member, const Read& value) {
  try {
    return value();
  } catch (const std::exception&) {
    throw ConfigError(std::string(what) + ": '" + member +
                      "' is missing, or not what it should be; give what json() has written");
  }
}

std::uint64_t count_member(const boost::json::object& of, const char* what, const char* member);
/// Throws ConfigError for a count that does not fit into 32 bits, too.
std::uint32_t small_count_member(const boost::json::object& of, const char* what, const char* member);
bool flag_member(const boost::json::object& of, const char* what, const char* member);
double real_member(const boost::json::object& of, const char* what, const char* member);
std::string text_member(const boost::json::object& of, const char* what, const char* member);
boost::json::array array_member(const boost::json::object& of, const char* what, const char* member);
boost::json::object object_member(const boost::json::object& of, const char* what, const char* member);

}  // namespace reef
