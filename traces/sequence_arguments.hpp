#pragma once

#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/details.hpp"

namespace hae::traces {

/// What a recording of another program does not say about itself, so that its importer must be told: an
/// argument, never a guess.
struct SequenceArguments {
  Index prompt = 0;  ///< P: the first P tokens are the prompt
  std::vector<Range>
      images;          ///< the tokens of each picture, disjoint, in any order; none: all tokens are text
  std::string name;    ///< empty: the name of what is imported
  std::string group;   ///< empty: the name
  TraceOrigin origin;  ///< written into the trace
};

}  // namespace hae::traces
