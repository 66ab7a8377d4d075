// A recipe: what one call of a kernel allocates and launches, as plain data, and the code that does it.
//
// Built from `tilewright.records.recipe`. Tensors are numbered: the inputs first, then the buffers in order.

#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>

namespace tilewright {

using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 16>;

constexpr int INVALID_CONTEXT = 201;

// CUDA's driver and PyTorch's current stream, found at run time: the build needs neither CUDA's headers nor libraries.
struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                  int, int, int);
    int (*make_current)(void*);
    int (*is_capturing)(void*, int*);
    int (*current_stream)(int32_t, void**);
    void* context;
};

struct Layout {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    at::Device device;
    bool is_unresolved = false;  // whether a tensor may be shown conjugated or negated
};

struct TensorMap {
    static constexpr int BYTES = 128, ALIGNMENT = 64;
    int dtype, swizzle, promotion;
    std::vector<uint64_t> sizes, strides;  // strides in bytes, of all axes but the innermost, which comes first
    std::vector<uint32_t> box, steps;
};

enum Kind : int { POINTER, NUMBER, SEED, OFFSET, MAP, STRUCTURE };  // as in `executor.py`

struct Argument {
    int kind, tensor;
    uint64_t value;  // POINTER: bytes from the tensor's begin; NUMBER: the parameter's bytes; MAP, STRUCTURE: an index
};

struct Patch {
    size_t at;       // bytes from the begin of the structure
    Argument value;  // of eight bytes
};

struct Structure {
    std::vector<uint8_t> bytes;
    std::vector<Patch> patches;
};

enum Act : int { LAUNCH, COPY, FILL };  // as in `executor.py`

// Elements of a tensor, `offset` of them before the first.
struct Part {
    std::vector<int64_t> sizes, strides;
    int64_t offset;
};

struct Action {
    int act;
    int target, source;  // COPY, FILL: tensors
    double value;        // FILL
    std::optional<Part> part;
    void* function;      // LAUNCH
    unsigned grid[3], threads, shared_bytes;
    std::vector<Argument> arguments;
};

struct Recipe {
    std::string name;
    at::Device device;
    Driver driver;
    std::vector<int64_t> residues;  // of each input, its address modulo `modulus`
    uintptr_t modulus;
    std::vector<Layout> buffers;
    std::vector<int> results;  // buffers, numbered from 0
    std::vector<Action> actions;
    std::vector<TensorMap> maps;
    std::vector<Structure> structures;
    uint64_t advance;  // of the device's default generator
    std::vector<Tensor> keep;  // their addresses are among the numbers
};

struct Drawn {
    uint64_t seed = 0, offset = 0;
};

// Messages are strings and no streams: where two C++ libraries share a process, a stream may find the other's facets.
[[noreturn]] inline void fail(const std::string& message) { TORCH_CHECK(false, message); }

inline void require_success(int status, const std::string& name, const char* what) {
    if (status) fail(name + ": the driver refuses " + what + ": CUDA error " + std::to_string(status));
}

inline uintptr_t address(const Tensor& x) { return (uintptr_t)x.const_data_ptr(); }

// An uninitialised tensor on the current device of the layout's type.
inline Tensor empty(const Layout& x) {
    // Without the dispatcher, which costs as much as the allocation.
    if (x.device.type() == at::kCPU) return Tensor(at::detail::empty_strided_cpu(x.sizes, x.strides, x.dtype));
    if (x.device.type() != at::kCUDA)
        return at::empty_strided(x.sizes, x.strides, at::TensorOptions().device(x.device).dtype(x.dtype));
    return at::detail::empty_strided_generic(x.sizes, x.strides, c10::GetAllocator(at::kCUDA),
                                             c10::DispatchKeySet(c10::DispatchKey::CUDA), x.dtype);
}

inline Tensor part_of(const Tensor& x, const std::optional<Part>& part) {
    return part ? x.as_strided(part->sizes, part->strides, x.storage_offset() + part->offset) : x;
}

// Whether the recipe holds for tensors at these addresses.
inline bool fits(const Recipe& recipe, const Tensor* inputs) {
    for (size_t i = 0; i < recipe.residues.size(); ++i)
        if (address(inputs[i]) % recipe.modulus != (uintptr_t)recipe.residues[i]) return false;
    return true;
}

inline void* stream_of(const Recipe& recipe) {
    void* stream = nullptr;
    if (recipe.driver.current_stream(recipe.device.index(), &stream)) fail("PyTorch gives no current stream");
    return stream;
}

// Seed and offset of the device's default generator, which advances.
inline Drawn draw(const Recipe& recipe) {
    at::Generator generator = at::globalContext().defaultGenerator(recipe.device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    Drawn drawn{generator.current_seed(), generator.get_offset()};
    generator.set_offset(drawn.offset + recipe.advance);
    return drawn;
}

struct alignas(TensorMap::ALIGNMENT) Encoded {
    uint8_t bytes[TensorMap::BYTES];
};

inline void encode(const Recipe& recipe, const TensorMap& map, uintptr_t at, Encoded& encoded) {
    int status = recipe.driver.encode(encoded.bytes, map.dtype, map.sizes.size(), (void*)at, map.sizes.data(),
                                      map.strides.data(), map.box.data(), map.steps.data(), 0, map.swizzle,
                                      map.promotion, 0);
    require_success(status, recipe.name, "a tensor map");
}

// The eight bytes of an argument that is a pointer, a number, the seed or the offset.
inline uint64_t word_of(const Argument& x, const Tensor* tensors, const Drawn& drawn) {
    if (x.kind == POINTER) return address(tensors[x.tensor]) + x.value;
    return x.kind == SEED ? drawn.seed : x.kind == OFFSET ? drawn.offset : x.value;
}

inline void launch(const Recipe& recipe, const Action& action, const Tensor* tensors, const Drawn& drawn,
                   void* stream) {
    size_t count = action.arguments.size();
    c10::SmallVector<uint64_t, 48> values(count);
    c10::SmallVector<void*, 48> places(count);
    std::vector<Encoded> maps;
    std::vector<std::vector<uint8_t>> structures;
    maps.reserve(count);
    for (size_t i = 0; i < count; ++i) {
        const Argument& x = action.arguments[i];
        places[i] = &values[i];
        switch (x.kind) {
            case MAP:
                maps.emplace_back();
                encode(recipe, recipe.maps[x.value], address(tensors[x.tensor]), maps.back());
                places[i] = maps.back().bytes;
                break;
            case STRUCTURE:
                structures.push_back(recipe.structures[x.value].bytes);
                for (const Patch& patch : recipe.structures[x.value].patches) {
                    uint64_t word = word_of(patch.value, tensors, drawn);
                    memcpy(structures.back().data() + patch.at, &word, sizeof word);
                }
                places[i] = structures.back().data();
                break;
            default: values[i] = word_of(x, tensors, drawn);
        }
    }
    auto send = [&] {
        return recipe.driver.launch(action.function, action.grid[0], action.grid[1], action.grid[2], action.threads, 1,
                                    1, action.shared_bytes, stream, places.data(), nullptr);
    };
    int status = send();
    // A thread that has done nothing on the device yet has no context.
    if (status == INVALID_CONTEXT && recipe.driver.make_current(recipe.driver.context) == 0) status = send();
    require_success(status, recipe.name, "a launch");
}

// Do the actions on `tensors`: the inputs, then the buffers. The recipe's device is the current one.
inline void perform(const Recipe& recipe, const Tensors& tensors) {
    if (recipe.actions.empty()) return;
    // A recipe without launches has no driver.
    void* stream = recipe.driver.current_stream ? stream_of(recipe) : nullptr;
    // The driver fails on a tensor map that is encoded by a thread without a context.
    if (!recipe.maps.empty()) recipe.driver.make_current(recipe.driver.context);
    Drawn drawn;
    if (recipe.advance) drawn = draw(recipe);
    for (const Action& action : recipe.actions) {
        if (action.act == COPY)
            tensors[action.target].copy_(tensors[action.source]);
        else if (action.act == FILL)
            part_of(tensors[action.target], action.part).fill_(action.value);
        else
            launch(recipe, action, tensors.data(), drawn, stream);
    }
}

// Whether the stream is being captured into a CUDA graph; each replay would have to draw anew what a recipe draws once.
inline bool is_captured(const Recipe& recipe) {
    int captured = 0;
    return recipe.driver.is_capturing(stream_of(recipe), &captured) || captured;
}

inline bool is_captured_draw(const Recipe& recipe) {
    return recipe.advance && is_captured(recipe);
}

}  // namespace tilewright
