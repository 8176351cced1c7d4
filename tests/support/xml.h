#pragma once

#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace reef::test {

struct XmlElement {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;  ///< directly inside, entities resolved
};

/// The part of XML 1.0 that a generated document may use: elements, attributes in double quotes, the five
/// named entities. Throws std::runtime_error at the first place that is not well-formed.
class XmlParser {
 public:
  explicit XmlParser(std::string_view document) : rest_(document) {}

  /// Every element, in the order of the opening tags.
  std::vector<XmlElement> parse() {
    element();
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front()))) rest_.remove_prefix(1);
    require(rest_.empty(), "something follows the root");
    return elements_;
  }

 private:
  void require(bool holds, const char* what) const {
    if (!holds) throw std::runtime_error(std::string(what) + " before: " + std::string(rest_.substr(0, 60)));
  }

  bool take(std::string_view token) {
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }

  std::string name() {
    std::string found;
    while (!rest_.empty() &&
           (std::isalnum(static_cast<unsigned char>(rest_.front())) || rest_.front() == '-')) {
      found += rest_.front();
      rest_.remove_prefix(1);
    }
    require(!found.empty() && std::isalpha(static_cast<unsigned char>(found.front())), "no name");
    return found;
  }

  std::string characters(char end) {
    std::string found;
    for (;;) {
      require(!rest_.empty(), "the document ends");
      const char next = rest_.front();
      if (next == end) return found;
      require(next != '<', "a bare <");
      require(static_cast<unsigned char>(next) >= 0x20 || next == '\n' || next == '\t' || next == '\r',
              "a control character");
      if (next == '&') {
        if (take("&amp;"))
          found += '&';
        else if (take("&lt;"))
          found += '<';
        else if (take("&gt;"))
          found += '>';
        else if (take("&quot;"))
          found += '"';
        else if (take("&apos;"))
          found += '\'';
        else
          require(false, "an unknown entity");
        continue;
      }
      found += next;
      rest_.remove_prefix(1);
    }
  }

  void element() {
    require(take("<"), "no element");
    const std::size_t index = elements_.size();
    elements_.push_back({name(), {}, ""});
    while (take(" ")) {
      const std::string attribute = name();
      require(take("=\""), "an attribute without a quoted value");
      require(elements_[index].attributes.emplace(attribute, characters('"')).second, "an attribute twice");
      take("\"");
    }
    if (take("/>")) return;
    require(take(">"), "an open tag");
    for (;;) {
      elements_[index].text += characters('<');
      if (take("</")) break;
      element();
    }
    require(take(elements_[index].name + ">"), "the wrong closing tag");
  }

  std::string_view rest_;
  std::vector<XmlElement> elements_;
};

inline std::vector<XmlElement> parse_xml(std::string_view document) { return XmlParser(document).parse(); }

}  // namespace reef::test
