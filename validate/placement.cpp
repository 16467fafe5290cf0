#include "validate/placement.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "sim/errors.hpp"
#include "validate/draw.hpp"

namespace hae::validate {
namespace {

constexpr Index kAlignment = 256;
constexpr Index kGuard = 512;  ///< bytes on either side of a piece
constexpr Index kFar = Index{1} << 31;

/// Guards and gaps: a NaN in every floating-point type, so that reading them shows.
constexpr auto kForeign = std::byte{0xFF};

std::vector<Index> merged_shape(const Problem& problem, const Tensor& tensor) {
  std::vector<Index> shape;
  // Below items, lanes and group are one axis, query_heads; without items a lane stands alone.
  const bool merges = std::ranges::count(tensor.axes, Axis::items) > 0;
  for (const Axis axis : tensor.axes) {
    if (merges && axis == Axis::group) {
      shape.back() *= problem.extent(axis);
    } else {
      shape.push_back(problem.extent(axis));
    }
  }
  return shape;
}

/// Strides of the axes in an order of memory, outermost first.
std::vector<Index> strides_of(const std::vector<Index>& extents, Layout::Order order) {
  const std::size_t rank = extents.size();
  std::vector<std::size_t> outermost_first;
  for (std::size_t axis = 0; axis + 1 < rank; ++axis) {
    outermost_first.push_back(order == Layout::Order::token_major ? rank - 2 - axis : axis);
  }
  outermost_first.push_back(rank - 1);
  std::vector<Index> strides(rank);
  Index stride = 1;
  for (std::size_t a = rank; a-- > 0;) {
    const std::size_t axis = outermost_first[a];
    strides[axis] = stride;
    stride *= extents[axis] + (order == Layout::Order::padded ? 3 : 0);
  }
  return strides;
}

Index span_of(const std::vector<Index>& extents, const std::vector<Index>& strides) {
  Index last = 0;
  for (std::size_t axis = 0; axis < extents.size(); ++axis) {
    if (extents[axis] == 0) {
      return 0;
    }
    last += (extents[axis] - 1) * strides[axis];
  }
  return last + 1;
}

/// Spreads the outermost axis, so that its last index lies beyond 2^31 elements. Arrays with one index stay.
///
/// last  index of the outermost axis that a kernel goes to
void spread(PlacedArray::Shape& shape, Index last) {
  if (last < 1) {
    return;
  }
  const Index inner = span_of({shape.extents.begin() + 1, shape.extents.end()},
                              {shape.strides.begin() + 1, shape.strides.end()});
  constexpr Index kLine = 64;  // pieces are aligned as the first is
  shape.strides[0] = (kFar / last / kLine + 1) * kLine;
  shape.pieces.clear();
  for (Index i = 0; i < shape.extents[0]; ++i) {
    shape.pieces.push_back({i * shape.strides[0], inner});
  }
}

PlacedArray::Shape plain(const std::vector<Index>& extents, const Layout& layout, bool far) {
  PlacedArray::Shape shape{extents, strides_of(extents, layout.order), {}, {}};
  shape.pieces = {{0, span_of(extents, shape.strides)}};
  if (far) {
    spread(shape, extents[0] - 1);
  }
  Index count = 1;
  for (const Index extent : extents) {
    count *= extent;
  }
  for (Index i = 0; i < count; ++i) {
    Index rest = i;
    Index offset = 0;
    for (std::size_t axis = extents.size(); axis-- > 0;) {
      offset += rest % extents[axis] * shape.strides[axis];
      rest /= extents[axis];
    }
    shape.offsets.push_back(offset);
  }
  return shape;
}

/// Of a problem whose arrays reach far: the numbers with most axes.
bool is_far(const Problem& problem, const Tensor& tensor) {
  const auto rank = [&](const Tensor& other) {
    return is_float(other.type) ? merged_shape(problem, other).size() : 0;
  };
  const auto of_less_rank = [&](const Tensor& other) { return rank(other) <= rank(tensor); };
  return problem.layout.far && is_float(tensor.type) && std::ranges::all_of(problem.inputs, of_less_rank) &&
         std::ranges::all_of(problem.outputs, of_less_rank);
}

Index blocks_of(const Problem& problem) {
  const Index page = problem.layout.page_size;
  return (problem.extent(Axis::slots) + page - 1) / page;
}

/// The page of each [item, block], scattered; one more page belongs to nobody.
std::vector<Index> pages_of(const Problem& problem) {
  return Draw("pages", 0).permutation(problem.extent(Axis::items) * blocks_of(problem));
}

/// [items, lanes, slots, head_dim] in pages: [pages, lanes, page_size, head_dim].
PlacedArray::Shape paged(const Problem& problem) {
  const Index page_size = problem.layout.page_size;
  const Index blocks = blocks_of(problem);
  const std::vector<Index> pages = pages_of(problem);
  PlacedArray::Shape shape;
  shape.extents = {std::ssize(pages) + 1, problem.extent(Axis::lanes), page_size,
                   problem.extent(Axis::head_dim)};
  // Token-major pages are [pages, page_size, lanes, head_dim], as vLLM keeps them: pages stay outermost.
  const std::vector<Index> inner =
      strides_of({shape.extents.begin() + 1, shape.extents.end()}, problem.layout.order);
  const bool is_padded = problem.layout.order == Layout::Order::padded;
  shape.strides = {span_of({shape.extents.begin() + 1, shape.extents.end()}, inner) + (is_padded ? 3 : 0)};
  shape.strides.insert(shape.strides.end(), inner.begin(), inner.end());
  shape.pieces = {{0, span_of(shape.extents, shape.strides)}};
  if (problem.layout.far) {
    spread(shape, std::ssize(pages) - 1);
  }
  for (Index item = 0; item < problem.extent(Axis::items); ++item) {
    for (Index lane = 0; lane < shape.extents[1]; ++lane) {
      for (Index slot = 0; slot < problem.extent(Axis::slots); ++slot) {
        const Index page = pages[at(item * blocks + slot / page_size)];
        const Index row =
            page * shape.strides[0] + lane * shape.strides[1] + slot % page_size * shape.strides[2];
        for (Index i = 0; i < shape.extents[3]; ++i) {
          shape.offsets.push_back(row + i);
        }
      }
    }
  }
  return shape;
}

void expect_done(std::int32_t status, const char* what) {
  if (status != 0) {
    throw DeviceError(std::string("the library's memory.") + what + " returned " + std::to_string(status));
  }
}

}  // namespace

std::shared_ptr<void> Memory::allocate(Index bytes) const {
  const Index rounded_up = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = is_host() ? std::aligned_alloc(kAlignment, at(rounded_up)) : device_.allocate(rounded_up);
  if (memory == nullptr) {
    throw NoMemory((is_host() ? "no memory" : "the library's memory.allocate gave nothing") +
                   std::string(" for an array of ") + std::to_string(bytes) +
                   " bytes; free some and try again");
  }
  return {memory, is_host() ? std::free : device_.release};
}

std::shared_ptr<void> Memory::allocate_sparse(Index bytes) const {
  if (!is_host()) {
    return allocate(bytes);
  }
  void* memory =
      mmap(nullptr, at(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw NoMemory("no addresses for an array of " + std::to_string(bytes) +
                   " bytes; allow overcommitted memory");
  }
  return {memory, [bytes](void* mapped) { munmap(mapped, at(bytes)); }};
}

void Memory::copy_in(void* device, const void* host, Index bytes) const {
  if (is_host()) {
    std::memcpy(device, host, at(bytes));
  } else {
    expect_done(device_.copy_in(device, host, bytes, device_.stream), "copy_in");
    synchronize(Stream::own);
  }
}

void Memory::copy_out(void* host, const void* device, Index bytes) const {
  if (is_host()) {
    std::memcpy(host, device, at(bytes));
  } else {
    expect_done(device_.copy_out(host, device, bytes, device_.stream), "copy_out");
    synchronize(Stream::own);
  }
}

void Memory::synchronize(Stream stream) const {
  if (!is_host() && device_.synchronize != nullptr) {
    expect_done(device_.synchronize(handle(stream)), "synchronize");
  }
}

hae_context Memory::context(Stream stream) const {
  hae_context context{};
  context.device_type = is_host() ? 1 : device_.device_type;
  context.device = device_.device;
  context.stream = handle(stream);
  return context;
}

PlacedArray::PlacedArray(Type type, Shape shape, bool misaligned, bool writable, const Memory& memory)
    : type_(type),
      shape_(std::move(shape)),
      writable_(writable),
      memory_(memory),
      lead_(kGuard + (misaligned ? bytes_of(type) : 0)),
      begins_{0} {
  const Index size = bytes_of(type_);
  for (const Piece& piece : shape_.pieces) {
    begins_.push_back(begins_.back() + lead_ + piece.span * size + kGuard);
  }
  before_.resize(at(begins_.back()));
  std::size_t piece = 0;
  for (const Index offset : shape_.offsets) {
    while (offset < shape_.pieces[piece].offset) {
      --piece;
    }
    while (offset >= shape_.pieces[piece].offset + shape_.pieces[piece].span) {
      ++piece;
    }
    places_.push_back(begins_[piece] + lead_ + (offset - shape_.pieces[piece].offset) * size);
  }
  if (shape_.pieces.size() == 1) {
    block_ = memory_.allocate(begins_.back());
  } else {
    // An offset that lost its upper bits, and so is negative, is within the block too: it is no crash.
    origin_ = kFar * size;
    const Piece& last = shape_.pieces.back();
    block_ = memory_.allocate_sparse(origin_ + lead_ + (last.offset + last.span) * size + kGuard);
  }
  array_.data = address(0) + lead_;
  array_.dtype = static_cast<std::int32_t>(type);
  array_.rank = static_cast<std::int32_t>(shape_.extents.size());
  HAE_EXPECTS(array_.rank <= HAE_MAX_RANK);
  std::ranges::copy(shape_.extents, array_.shape);
  std::ranges::copy(shape_.strides, array_.strides);
}

std::byte* PlacedArray::address(std::size_t piece) const {
  return static_cast<std::byte*>(block_.get()) + origin_ + shape_.pieces[piece].offset * bytes_of(type_);
}

void PlacedArray::fill(const std::vector<double>* values, unsigned char poison) {
  std::ranges::fill(before_, kForeign);
  for (Index i = 0; i < std::ssize(places_); ++i) {
    std::byte* element = before_.data() + places_[at(i)];
    if (values != nullptr) {
      store(type_, (*values)[at(i)], element);
    } else {
      std::fill_n(element, bytes_of(type_), std::byte{poison});
    }
  }
  for (std::size_t piece = 0; piece < shape_.pieces.size(); ++piece) {
    memory_.copy_in(address(piece), before_.data() + begins_[piece], bytes(piece));
  }
}

void PlacedArray::fetch() {
  after_.resize(before_.size());
  for (std::size_t piece = 0; piece < shape_.pieces.size(); ++piece) {
    memory_.copy_out(after_.data() + begins_[piece], address(piece), bytes(piece));
  }
}

const std::byte* PlacedArray::element(Index index) const {
  return after_.data() + places_[at(index)];
}

std::vector<double> PlacedArray::values() const {
  std::vector<double> values;
  for (Index i = 0; i < std::ssize(places_); ++i) {
    values.push_back(load(type_, element(i)));
  }
  return values;
}

std::string PlacedArray::damage() const {
  if (after_ == before_) {
    return "";
  }
  std::vector<std::byte> allowed = after_;
  if (writable_) {  // what an output's elements hold is for the verdict on values
    for (const Index place : places_) {
      std::copy_n(before_.data() + place, bytes_of(type_), allowed.data() + place);
    }
  }
  const auto [first, other] = std::ranges::mismatch(allowed, before_);
  if (first == allowed.end()) {
    return "";
  }
  const Index byte_of_all = first - allowed.begin();
  const auto number = std::ranges::upper_bound(begins_, byte_of_all) - begins_.begin() - 1;
  const Piece& piece = shape_.pieces[at(number)];
  const Index byte = byte_of_all - begins_[at(number)] - lead_;  // of the piece
  const Index size = bytes_of(type_);
  if (byte < 0 && number == 0) {
    return "written " + std::to_string(-byte) + " bytes before its first element";
  }
  if (byte >= piece.span * size && at(number) + 1 == shape_.pieces.size()) {
    return "written " + std::to_string(byte / size - piece.span + 1) + " elements beyond its last one";
  }
  return (writable_ ? "written between its elements, at element offset "
                    : "an input, written at element offset ") +
         std::to_string(piece.offset + byte / size);
}

Placement::Placement(const Problem& problem, const Memory& memory) {
  for (const Tensor& tensor : problem.inputs) {
    place(problem, tensor, problem.output(tensor.name) != nullptr, memory);
  }
  give(problem);
  for (const Tensor& tensor : problem.outputs) {
    if (placed_.contains(tensor.name)) {
      continue;
    }
    const std::string from = tensor.name.substr(0, tensor.name.rfind("_out"));
    if (problem.layout.in_place && placed_.contains(from)) {
      placed_[from]->allow_writing();
      placed_[tensor.name] = placed_[from];
    } else {
      place(problem, tensor, true, memory);
    }
  }
  if (problem.layout.page_size > 0) {
    place_block_table(problem, memory);
  }
}

void Placement::place(const Problem& problem, const Tensor& tensor, bool writable, const Memory& memory) {
  const bool in_pages = problem.layout.page_size > 0 && (tensor.name == "keys" || tensor.name == "values");
  PlacedArray::Shape shape =
      in_pages ? paged(problem)
               : plain(merged_shape(problem, tensor), problem.layout, is_far(problem, tensor));
  placed_[tensor.name] = std::make_shared<PlacedArray>(tensor.type, std::move(shape),
                                                       problem.layout.misaligned, writable, memory);
}

void Placement::place_block_table(const Problem& problem, const Memory& memory) {
  const std::vector<Index> pages = pages_of(problem);
  contents_["block_table"].assign(pages.begin(), pages.end());
  placed_["block_table"] = std::make_shared<PlacedArray>(
      Type::int32, plain({problem.extent(Axis::items), blocks_of(problem)}, problem.layout, false),
      problem.layout.misaligned, false, memory);
}

void Placement::give(const Problem& problem) {
  for (const Tensor& tensor : problem.inputs) {
    contents_[tensor.name] = tensor.values;
  }
}

void Placement::fill(unsigned char poison) {
  for (const auto& [name, array] : placed_) {
    const auto contents = contents_.find(name);
    const bool shared =
        contents == contents_.end() && array.use_count() > 1;  // filled by the name it is read by
    if (!shared) {
      array->fill(contents == contents_.end() ? nullptr : &contents->second, poison);
    }
  }
}

void Placement::fetch() {
  for (const auto& [name, array] : placed_) {
    array->fetch();
  }
}

hae_array Placement::array(const std::string& name) const {
  const auto found = placed_.find(name);
  return found == placed_.end() ? hae_array{} : found->second->array();
}

std::map<std::string, std::string> Placement::damage() const {
  std::map<std::string, std::string> found;
  for (const auto& [name, array] : placed_) {
    if (std::string what = array->damage(); !what.empty()) {
      found[name] = std::move(what);
    }
  }
  return found;
}

}  // namespace hae::validate
