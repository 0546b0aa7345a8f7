// Compute attention over a pack's branches on a CPU with bfloat16 instructions, in one pass over each branch's keys, with scores
// and sums in float32 (the online softmax of FlashAttention, arxiv.org/abs/2205.14135). The matrix products are computed by oneDNN
// through ATen. cpu_attention.py compiles this file and calls its kernel.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using Bf16 = at::BFloat16;
using Floats = at::vec::Vectorized<float>;

// Number of keys in a block, the same as in torch's own kernel. The softmax also rounds in the same way as that kernel (same
// exponential; weights are summed before they are rounded). The two kernels' values therefore differ only in the order of sums.
constexpr int64_t kKeys = 512;
constexpr int64_t kRows = 128;            // queries times heads in a task
constexpr int64_t kKeysAtOnce = 1 << 13;  // limit of keys with reordered copies in memory; a single branch may exceed it
// The shapes of matrix products are rounded up, because oneDNN generates and caches code for each new shape.
constexpr int64_t kRowStep = 16, kKeyStep = 32;
constexpr float kNone = -std::numeric_limits<float>::infinity();

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

struct Branch {
  int64_t start, stop, shared;  // start and end of its own tokens, and the number of keys before them
  int64_t path;                 // index in `paths` of its first key
  int64_t first_block;          // index of the first block of its copied keys
  int64_t keys() const { return shared + stop - start; }
  int64_t blocks() const { return rounded_up(keys(), kKeys) / kKeys; }
  // Index of the copy of a block for one key head.
  int64_t copy(int64_t key_heads, int64_t key_head, int64_t block) const {
    return first_block * key_heads + key_head * blocks() + block;
  }
};

// A task: some queries of a branch, for all query heads that share one key head.
struct Task {
  int64_t branch, key_head, first_query, queries;
};

// Releases the state that oneDNN's products leave in a thread (tiles of the matrix units), even after an error.
struct Products {
  ~Products() { at::native::cpublas::brgemm_release(); }
};

struct Call {
  const Bf16 *query, *key, *value;  // (heads, tokens, size), last stride 1
  Bf16* out;                        // (tokens, heads, value size), contiguous
  const int64_t* paths;
  int64_t query_head_stride, query_stride, key_head_stride, key_stride, value_head_stride, value_stride;
  int64_t heads, group, size, value_size;  // group: query heads per key head
  float scale;
  int64_t window;  // number of keys that a query attends to; 0 for all
};

// Distributes the indices 0 … count - 1 over threads. Each thread calls `work` once, then the result for each index it takes.
template <typename Work>
void share_out(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
    auto own = work();
    for (int64_t index = next++; index < count; index = next++) own(index);
  });
}

// Copies a block of keys and values in the order in which the products read it: pairs of the summed dimension are adjacent.
void reorder(const Call& call, const int64_t* places, int64_t count, int64_t key_head, Bf16* keys, Bf16* values) {
  const int64_t width = rounded_up(count, kKeyStep);
  const Bf16* from = call.key + key_head * call.key_head_stride;
  for (int64_t n = 0; n < width; ++n) {
    const Bf16* row = from + places[std::min(n, count - 1)] * call.key_stride;  // positions after the last key are masked
    for (int64_t d = 0; d < call.size; d += 2) std::memcpy(keys + d * kKeys + n * 2, row + d, 2 * sizeof(Bf16));
  }
  from = call.value + key_head * call.value_head_stride;
  const std::vector<Bf16> nothing(call.value_size, Bf16(0));  // zeros, because a weight of 0 times NaN would not be 0
  for (int64_t n = 0; n < width; n += 2) {
    const Bf16* even = n < count ? from + places[n] * call.value_stride : nothing.data();
    const Bf16* odd = n + 1 < count ? from + places[n + 1] * call.value_stride : nothing.data();
    for (int64_t d = 0; d < call.value_size; ++d) {
      values[n * call.value_size + d * 2] = even[d];
      values[n * call.value_size + d * 2 + 1] = odd[d];
    }
  }
}

// Turns the scores of one row into weights relative to the row's greatest score so far, and rescales its sum and its output.
void softmax_row(float* scores, int64_t width, int64_t low, int64_t high, float scale, Bf16* weights, float& greatest, float& sum,
            float* out, int64_t value_size) {
  std::fill(scores, scores + std::min(low, width), kNone);
  std::fill(scores + std::max<int64_t>(0, std::min(high, width)), scores + width, kNone);
  Floats most(kNone);
  for (int64_t n = 0; n < width; n += Floats::size()) most = at::vec::maximum(most, Floats::loadu(scores + n));
  float now = greatest;
  float lanes[Floats::size()];
  most.store(lanes);
  // If a score is NaN, then `now`, the sum and the output become NaN too.
  for (float lane : lanes) now = (lane * scale > now || std::isnan(lane)) ? lane * scale : now;
  if (now == kNone) {  // the query has not attended to any key yet
    std::fill(weights, weights + width, Bf16(0));
    return;
  }
  const Floats shift(now), factor(scale);
  Floats total(0.0f);
  for (int64_t n = 0; n < width; n += 2 * Floats::size()) {
    Floats left = (Floats::loadu(scores + n) * factor - shift).fexp_u20();
    Floats right = (Floats::loadu(scores + n + Floats::size()) * factor - shift).fexp_u20();
    const auto rounded = at::vec::convert_from_float<Bf16>(left, right);
    rounded.store(weights + n);
    total = total + left + right;
  }
  total.store(lanes);
  float added = 0.0f;
  for (float lane : lanes) added += lane;
  const float kept = std::exp(greatest - now);
  sum = sum * kept + added;
  greatest = now;
  if (kept != 1.0f) {
    for (int64_t d = 0; d < value_size; ++d) out[d] *= kept;
  }
}

class Worker {
 public:
  Worker(const Call& call, const std::vector<Branch>& branches, const Bf16* keys, const Bf16* values)
      : call_(call), branches_(branches), keys_(keys), values_(values), rows_(rounded_up(std::max(kRows, call.group), kRowStep)),
        query_(rows_ * call.size), weights_(rows_ * kKeys), scores_(rows_ * kKeys), out_(rows_ * call.value_size),
        greatest_(rows_), sums_(rows_) {}

  void operator()(const Task& task) {
    const Branch& branch = branches_[task.branch];
    const int64_t rows = task.queries * call_.group, padded = rounded_up(rows, kRowStep);
    for (int64_t row = 0; row < padded; ++row) {
      Bf16* to = query_.data() + row * call_.size;
      if (row >= rows) {
        std::fill(to, to + call_.size, Bf16(0));
        continue;
      }
      const int64_t head = task.key_head * call_.group + row / task.queries;
      const Bf16* from = call_.query + head * call_.query_head_stride +
                         (branch.start + task.first_query + row % task.queries) * call_.query_stride;
      std::copy(from, from + call_.size, to);
    }
    std::fill(greatest_.begin(), greatest_.end(), kNone);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    std::fill(out_.begin(), out_.end(), 0.0f);

    const int64_t first_query = branch.shared + task.first_query;  // index on the branch's path
    const int64_t from = call_.window ? std::max<int64_t>(0, first_query - call_.window + 1) / kKeys : 0;
    const int64_t last_key = first_query + task.queries;
    for (int64_t block = from; block * kKeys < last_key; ++block) {
      const int64_t start = block * kKeys;
      const int64_t width = rounded_up(std::min(kKeys, last_key - start), kKeyStep);
      const int64_t copy = branch.copy(call_.heads / call_.group, task.key_head, block);
      at::native::cpublas::brgemm(padded, width, call_.size, call_.size, kKeys, kKeys, false, query_.data(),
                                  keys_ + copy * kKeys * call_.size, scores_.data());
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t query = first_query + row % task.queries;
        const int64_t low = call_.window ? std::max<int64_t>(0, query - call_.window + 1 - start) : 0;
        softmax_row(scores_.data() + row * kKeys, width, low, query + 1 - start, call_.scale, weights_.data() + row * kKeys,
               greatest_[row], sums_[row], out_.data() + row * call_.value_size, call_.value_size);
      }
      at::native::cpublas::brgemm(padded, call_.value_size, width, kKeys, call_.value_size, call_.value_size, true,
                                  weights_.data(), values_ + copy * kKeys * call_.value_size, out_.data());
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = task.key_head * call_.group + row / task.queries;
      const int64_t token = branch.start + task.first_query + row % task.queries;
      Bf16* to = call_.out + (token * call_.heads + head) * call_.value_size;
      const float* values = out_.data() + row * call_.value_size;
      for (int64_t d = 0; d < call_.value_size; ++d) to[d] = Bf16(values[d] / sums_[row]);
    }
  }

 private:
  const Call& call_;
  const std::vector<Branch>& branches_;
  const Bf16 *keys_, *values_;
  int64_t rows_;
  std::vector<Bf16> query_, weights_;
  std::vector<float> scores_, out_, greatest_, sums_;
};

void attend_branches(const Call& call, std::vector<Branch> branches) {
  const int64_t key_heads = call.heads / call.group, step = std::max<int64_t>(1, kRows / call.group);
  int64_t blocks = 0;
  struct Block {
    int64_t branch, key_head, block;
  };
  std::vector<Block> reorders;
  std::vector<Task> tasks;
  for (int64_t b = 0; b < static_cast<int64_t>(branches.size()); ++b) {
    Branch& branch = branches[b];
    branch.first_block = blocks;
    for (int64_t head = 0; head < key_heads; ++head) {
      for (int64_t block = 0; block < branch.blocks(); ++block) reorders.push_back({b, head, block});
      const int64_t queries = branch.stop - branch.start;
      for (int64_t first = (queries - 1) / step * step; first >= 0; first -= step)  // those with the most keys first
        tasks.push_back({b, head, first, std::min(step, queries - first)});
    }
    blocks += branch.blocks();
  }
  at::Tensor keys = at::empty({blocks * key_heads * kKeys * call.size}, at::kBFloat16);
  at::Tensor values = at::empty({blocks * key_heads * kKeys * call.value_size}, at::kBFloat16);
  Bf16 *key_copies = keys.data_ptr<Bf16>(), *value_copies = values.data_ptr<Bf16>();
  share_out(static_cast<int64_t>(reorders.size()), [&] {
    return [&](int64_t index) {
      const Block& it = reorders[index];
      const Branch& branch = branches[it.branch];
      const int64_t first = it.block * kKeys, copy = branch.copy(key_heads, it.key_head, it.block);
      reorder(call, call.paths + branch.path + first, std::min(kKeys, branch.keys() - first), it.key_head,
              key_copies + copy * kKeys * call.size, value_copies + copy * kKeys * call.value_size);
    };
  });
  share_out(static_cast<int64_t>(tasks.size()), [&] {
    return [&, worker = Worker(call, branches, key_copies, value_copies), products = Products()](int64_t index) mutable {
      worker(tasks[index]);
    };
  });
}

// query (heads, tokens, size), key, value (key heads, tokens, size); spans int64 (branches, 3): first own token, end, keys before;
// paths int64: the indices of each branch's keys, one branch after another. Returns (tokens, heads, value size).
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& spans,
                  const at::Tensor& paths, double scale, int64_t window) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "last dimensions must be contiguous");
  TORCH_CHECK(query.size(2) == key.size(2) && query.size(2) % 2 == 0, "head sizes must be equal and even");
  TORCH_CHECK(key.size(0) > 0 && query.size(0) % key.size(0) == 0, "query heads must be a multiple of key heads");
  TORCH_CHECK(key.size(0) == value.size(0) && key.size(1) == value.size(1), "there must be as many values as keys");
  TORCH_CHECK(scale > 0, "the scale must be positive");
  at::Tensor out = at::empty({query.size(1), query.size(0), value.size(2)}, query.options());
  const int64_t* span = spans.data_ptr<int64_t>();
  const Call call{query.data_ptr<Bf16>(), key.data_ptr<Bf16>(), value.data_ptr<Bf16>(), out.data_ptr<Bf16>(),
                  paths.data_ptr<int64_t>(), query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
                  value.stride(1), query.size(0), query.size(0) / key.size(0), query.size(2), value.size(2),
                  static_cast<float>(scale), window};
  std::vector<Branch> some;
  int64_t path = 0, held = 0;
  for (int64_t b = 0; b < spans.size(0); ++b) {
    const Branch branch{span[b * 3], span[b * 3 + 1], span[b * 3 + 2], path, 0};
    const int64_t keys = rounded_up(branch.keys(), kKeys);
    if (!some.empty() && held + keys > kKeysAtOnce) {
      attend_branches(call, some);
      some.clear();
      held = 0;
    }
    some.push_back(branch);
    path += branch.keys();
    held += keys;
  }
  attend_branches(call, some);
  return out;
}

}  // namespace

TORCH_LIBRARY(reflogp, library) {
  library.def("attend(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor paths, float scale, int window) -> Tensor");
  library.impl("attend", at::kCPU, &attend);
}
