#include "sim/log.hpp"

#include "sim/text.hpp"

namespace hae {
namespace {

template <typename Number>
void append(std::string& text, Number value) {
  text += shortest(value);
}

template <typename Number>
void append(std::string& text, const std::optional<Number>& value) {
  if (value) {
    append(text, *value);
  } else {
    text += "null";
  }
}

void append_merge(std::string& text, const std::optional<Merge>& merge) {
  if (!merge) {
    text += "null";
    return;
  }
  append(text, merge->into);
  text += ",\"weights\":[";
  append(text, merge->kept_weight);
  text += ',';
  append(text, merge->weight);
  text += "],\"size\":";
  append(text, merge->size);
}

}  // namespace

std::string to_json_lines(const EvictionLog& log, std::optional<Index> sequence) {
  std::string text;
  for (const LogEntry& entry : log.entries) {
    text += '{';
    if (sequence) {
      text += "\"sequence\":";
      append(text, *sequence);
      text += ',';
    }
    text += "\"step\":";
    append(text, entry.step);
    text += ",\"layer\":";
    append(text, entry.layer);
    text += ",\"lane\":";
    append(text, entry.lane);
    text += ",\"token\":";
    append(text, entry.token);
    text += entry.within ? ",\"within\":true,\"score\":" : ",\"within\":false,\"score\":";
    append(text, entry.score);
    text += ",\"pending_since\":";
    append(text, entry.pending_since);
    text += ",\"into\":";
    append_merge(text, entry.merge);
    text += "}\n";
  }
  return text;
}

}  // namespace hae
