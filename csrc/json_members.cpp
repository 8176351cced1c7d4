#include "json_members.h"

#include <boost/json/src.hpp>

namespace reef {

namespace json = boost::json;

json::value parsed_json(std::string_view text, const char* what) {
  boost::system::error_code error;
  json::value value = json::parse(json::string_view(text.data(), text.size()), error);
  if (error) {
    throw ConfigError(std::string(what) + ": this is no JSON (" + error.message() +
                      "); give what json() has written");
  }
  return value;
}

std::uint64_t count_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).to_number<std::uint64_t>(); });
}

std::uint32_t small_count_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).to_number<std::uint32_t>(); });
}

bool flag_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).as_bool(); });
}

double real_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).to_number<double>(); });
}

std::string text_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return std::string(of.at(member).as_string()); });
}

json::array array_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).as_array(); });
}

json::object object_member(const json::object& of, const char* what, const char* member) {
  return read_member(what, member, [&] { return of.at(member).as_object(); });
}

}  // namespace reef
