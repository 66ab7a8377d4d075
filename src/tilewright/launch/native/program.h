// A program: a compiled graph as a list of steps over slots, run without returning to Python.
//
// Built from `tilewright.runtime.native`. A step is a recipe, a call of an operator through the dispatcher, a view,
// a constant, a call of a Python function, or a generated kernel on a CPU.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "recipe.h"

namespace tilewright {

using c10::IValue;
namespace py = pybind11;

// The result of a call is not as planned; Python then runs the graph operator by operator, as PyTorch does.
struct PlanMismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A kernel on a CPU was given an index that names no element.
struct IndexOutOfBounds : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Memory that a step fills: PyTorch allocates it or, if it is large, `pooled` does.
struct Fresh {
    Layout layout;
    py::object pooled;  // null: small
};

struct Result {
    int index, slot;  // which result of the operator; the slot that it goes to
    bool is_checked;
    Layout layout;
};

struct Operand {
    bool is_constant;
    IValue value;            // a constant
    std::vector<int> slots;  // of the elements of a list; -1: an absent element
    bool is_list, is_optional;
    std::optional<Fresh> fresh;  // for `out=`
};

struct Output {
    int slot, reuses;       // `reuses`: the slot whose memory the result takes over, or -1
    bool is_given = false;  // whether the slot `reuses` holds an argument of the call
};

using Kernel = int (*)(void** buffers, int threads);  // returns 1 if an index was out of bounds

enum StepKind : int { RECIPE, CALL, VIEW, CONSTANT, PYTHON, KERNEL };  // as in `native.py`

struct Step {
    int kind;
    std::string name;
    std::vector<int> frees;
    std::shared_ptr<const Recipe> recipe;  // RECIPE
    std::vector<int> inputs;               // RECIPE, PYTHON, KERNEL; VIEW: the base
    std::vector<Output> outputs;           // all but CALL
    py::object function;                   // PYTHON; RECIPE: called if the recipe does not fit the addresses
    std::optional<c10::OperatorHandle> handle;  // CALL; RECIPE: the operator that it stands for
    std::vector<Operand> operands;
    std::vector<Result> results;
    Layout layout;  // VIEW
    int64_t offset = 0;  // VIEW: elements from the base's first one
    Tensor constant;
    Kernel kernel = nullptr;
    std::vector<Fresh> results_of_kernel;
    std::vector<int64_t> sizes;  // KERNEL: its arguments, if it serves several sizes
    std::string outside;  // KERNEL: the error message for an index out of bounds
};

struct Program {
    at::Device device;
    std::optional<Driver> driver;  // of a GPU
    size_t slots;
    std::vector<std::optional<Layout>> inputs;
    std::vector<int> input_slots;
    std::vector<std::string> input_names;
    std::vector<bool> taken_over;  // inputs whose memory a result may take over
    std::vector<Step> steps;
    std::vector<int> output_slots;  // -1: the constant at that place
    std::vector<py::object> output_constants;
};

using Slots = std::vector<IValue>;

inline bool same_strides(const Tensor& x, const Layout& layout) {
    for (size_t i = 0; i < layout.sizes.size(); ++i)
        if (layout.sizes[i] != 1 && x.stride(i) != layout.strides[i]) return false;
    return true;
}

inline std::string described(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device) {
    std::string text = std::string(c10::toString(dtype)) + "[";
    for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + "] on " + device.str();
}

// `x` itself, or a copy where its strides are not those planned, or where kernels would read what its bits change.
inline Tensor conform(const Tensor& x, const Layout& layout, const std::string& name) {
    // A single number may be on the CPU where the plan has it on the GPU, as the seeds of PyTorch's attention are.
    bool elsewhere = x.dim() > 0 && x.device() != layout.device;
    if (x.scalar_type() != layout.dtype || x.sizes() != at::IntArrayRef(layout.sizes) || elsewhere)
        throw PlanMismatch(name + " is " + described(x.scalar_type(), x.sizes(), x.device()) + ", planned as " +
                           described(layout.dtype, layout.sizes, layout.device));
    bool is_shown = layout.is_unresolved || !(x.is_conj() || x.is_neg());
    if (x.numel() == 0 || (is_shown && same_strides(x, layout))) return x;
    for (size_t i = 0; i < layout.sizes.size(); ++i)
        if (layout.strides[i] == 0 && layout.sizes[i] > 1)
            throw PlanMismatch(name + " has not the planned strides, by which elements share memory");
    c10::DeviceGuard guard(layout.device);
    return empty(layout).copy_(x);
}

// The elements of `base` from number `offset` on under another shape, strides and dtype, with its conjugate and negative
// bits; not a view for autograd.
inline Tensor restrided(const Tensor& base, const Layout& layout, int64_t offset = 0) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), base.key_set(),
                                                           c10::scalarTypeToTypeMeta(layout.dtype));
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(layout.sizes, layout.strides, base.storage_offset() + offset);
    return made;
}

inline py::object to_python(const IValue& value) {
    if (value.isTensor()) return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
    if (value.isInt()) return py::int_(value.toInt());
    if (value.isDouble()) return py::float_(value.toDouble());
    if (value.isBool()) return py::bool_(value.toBool());
    if (!value.isNone()) fail("a slot holds a value that has no form in Python: " + value.tagKind());
    return py::none();
}

inline IValue from_python(PyObject* value) {
    if (THPVariable_Check(value)) return THPVariable_Unpack(value);
    if (value == Py_None) return IValue();
    if (PyBool_Check(value)) return value == Py_True;
    if (PyLong_CheckExact(value)) return (int64_t)PyLong_AsLongLong(value);
    if (PyFloat_CheckExact(value)) return PyFloat_AS_DOUBLE(value);
    fail(std::string("a slot holds tensors and numbers, not ") + Py_TYPE(value)->tp_name);
}

// ---------------------------------------------------------------- steps

inline Tensor allocated(const Fresh& fresh) {
    if (!fresh.pooled) return empty(fresh.layout);
    py::gil_scoped_acquire held;
    py::object made = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(fresh.pooled.ptr()));
    if (!made) throw python_error();
    return THPVariable_Unpack(made.ptr());
}

// Threads of OpenMP do not survive a fork: the child runs on the calling thread alone.
inline bool is_forked = false;

// The slot whose memory a result takes over, or -1. It takes over an argument's memory only if nothing else holds it:
// autograd holds it if backward can run again, and the caller may.
inline int reused(const Output& output, const Slots& slots) {
    bool is_held = output.is_given && slots[output.reuses].toTensor().storage().use_count() > 1;
    return is_held ? -1 : output.reuses;
}

inline void run_kernel(const Step& step, Slots& slots) {
    c10::SmallVector<void*, 24> buffers;
    for (int slot : step.inputs) buffers.push_back(slots[slot].toTensor().data_ptr());
    for (size_t i = 0; i < step.outputs.size(); ++i) {
        const Fresh& fresh = step.results_of_kernel[i];
        int reuses = reused(step.outputs[i], slots);
        Tensor made = reuses < 0 ? allocated(fresh) : restrided(slots[reuses].toTensor(), fresh.layout);
        buffers.push_back(made.data_ptr());
        slots[step.outputs[i].slot] = std::move(made);
    }
    buffers.push_back((void*)step.sizes.data());
    RECORD_USER_SCOPE(step.name);
    if (step.kernel(buffers.data(), is_forked ? 1 : at::get_num_threads())) throw IndexOutOfBounds(step.outside);
}

inline void call_python(const Step& step, Slots& slots) {
    py::gil_scoped_acquire held;
    py::tuple arguments(step.inputs.size());
    for (size_t i = 0; i < step.inputs.size(); ++i) arguments[i] = to_python(slots[step.inputs[i]]);
    // A CALL or RECIPE step lends its function the values and takes a sequence of results.
    py::object given = py::reinterpret_steal<py::object>(PyObject_CallObject(step.function.ptr(), arguments.ptr()));
    if (!given) throw python_error();
    py::sequence results(given);
    for (size_t i = 0; i < step.outputs.size(); ++i)
        slots[step.outputs[i].slot] = from_python(py::object(results[i]).ptr());
}

inline IValue value_of(const Operand& operand, const Slots& slots) {
    if (operand.is_constant) return operand.value;
    if (operand.fresh) return allocated(*operand.fresh);
    if (!operand.is_list) return slots[operand.slots[0]];
    if (operand.is_optional) {
        c10::List<std::optional<Tensor>> list;
        for (int slot : operand.slots)
            list.push_back(slot < 0 ? std::nullopt : std::optional<Tensor>(slots[slot].toTensor()));
        return list;
    }
    c10::List<Tensor> list;
    for (int slot : operand.slots) list.push_back(slots[slot].toTensor());
    return list;
}

// What a profiler records of a recipe: the arguments of the operator that it stands for, else its tensors.
inline std::vector<IValue> recorded(const Step& step, const Slots& slots, const Tensors& tensors) {
    std::vector<IValue> values;
    for (const Operand& operand : step.operands) values.push_back(value_of(operand, slots));
    if (!step.handle) values.assign(tensors.begin(), tensors.end());
    return values;
}

inline void run_recipe(const Step& step, Slots& slots) {
    const Recipe& recipe = *step.recipe;
    c10::SmallVector<int, 8> reuses;
    for (const Output& output : step.outputs)
        // A CUDA graph may replay a backward several times, so leave the arguments intact.
        reuses.push_back(output.is_given && is_captured(recipe) ? -1 : reused(output, slots));
    Tensors tensors;
    for (int slot : step.inputs) {
        const Tensor& x = slots[slot].toTensor();
        tensors.push_back(x.device() == recipe.device ? x : x.to(recipe.device));
    }
    if (!fits(recipe, tensors.data()) || is_captured_draw(recipe)) return call_python(step, slots);
    size_t inputs = tensors.size(), result = 0;
    for (size_t i = 0; i < recipe.buffers.size(); ++i) {
        bool is_result = result < recipe.results.size() && recipe.results[result] == (int)i;
        int over = is_result ? reuses[result] : -1;
        tensors.push_back(over < 0 ? empty(recipe.buffers[i]) : restrided(slots[over].toTensor(), recipe.buffers[i]));
        result += is_result;
    }
    {
        RECORD_FUNCTION(recipe.name.c_str(), recorded(step, slots, tensors));
        perform(recipe, tensors);
    }
    for (size_t i = 0; i < recipe.results.size(); ++i)
        slots[step.outputs[i].slot] = std::move(tensors[inputs + recipe.results[i]]);
}

inline void call_operator(const Step& step, Slots& slots) {
    torch::jit::Stack stack;
    stack.reserve(step.operands.size());
    for (const Operand& operand : step.operands) stack.push_back(value_of(operand, slots));
    step.handle->callBoxed(stack);
    for (const Result& result : step.results) {
        IValue& given = stack[result.index];
        slots[result.slot] = result.is_checked ? IValue(conform(given.toTensor(), result.layout, step.name)) : given;
    }
}

inline void run_step(const Step& step, Slots& slots) {
    switch (step.kind) {
        case RECIPE: run_recipe(step, slots); break;
        case CALL: call_operator(step, slots); break;
        case VIEW:
            slots[step.outputs[0].slot] = restrided(slots[step.inputs[0]].toTensor(), step.layout, step.offset);
            break;
        case KERNEL: run_kernel(step, slots); break;
        case CONSTANT: slots[step.outputs[0].slot] = step.constant; break;
        default: call_python(step, slots);
    }
    for (int slot : step.frees) slots[slot] = IValue();
}

inline void run_steps(const Program& program, Slots& slots) {
    // Autograd has seen the graph from outside; in-place operators still count versions.
    at::AutoDispatchBelowAutograd below;
    c10::DeviceGuard guard(program.device);
    // Autograd's threads have no context at first, and cuBLAS warns of that.
    if (program.driver) program.driver->make_current(program.driver->context);
    for (const Step& step : program.steps) run_step(step, slots);
}

// ---------------------------------------------------------------- a call

// Whether these are tensors with memory on real devices, and no mode replaces what operators compute.
inline bool is_plain(PyObject* const* arguments, size_t count) {
    using Mode = c10::impl::TorchDispatchModeKey;
    for (Mode mode : {Mode::FAKE, Mode::PROXY, Mode::FUNCTIONAL})
        if (c10::impl::TorchDispatchModeTLS::get_mode(mode)) return false;
    for (size_t i = 0; i < count; ++i) {
        PyObject* x = arguments[i];
        if (!THPVariable_Check(x)) continue;
        const Tensor& tensor = THPVariable_Unpack(x);
        if (tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage() || tensor.is_meta() ||
            tensor._is_zerotensor())
            return false;
    }
    return true;
}

// Whether the address range of a written tensor meets the range of another tensor, or has gaps: a quick check before
// `tilewright.runtime.overlap` compares elements.
inline bool may_meet(PyObject* arguments, PyObject* are_written) {
    struct Range {
        uintptr_t begin, end;
        bool is_written;
    };
    std::vector<Range> ranges;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
        PyObject* x = PyTuple_GET_ITEM(arguments, i);
        if (!THPVariable_Check(x)) continue;
        const Tensor& tensor = THPVariable_Unpack(x);
        if (!tensor.has_storage() || tensor.numel() == 0) continue;
        bool is_written = PyTuple_GET_ITEM(are_written, i) == Py_True;
        if (is_written && !tensor.is_non_overlapping_and_dense()) return true;
        auto begin = (uintptr_t)tensor.storage().data_ptr().get() + tensor.storage_offset() * tensor.itemsize();
        uintptr_t last = 0;
        for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
        ranges.push_back({begin, begin + (last + 1) * tensor.itemsize(), is_written});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    uintptr_t end = 0, end_of_written = 0;
    for (const Range& range : ranges) {
        if (range.begin < (range.is_written ? end : end_of_written)) return true;
        end = std::max(end, range.end);
        if (range.is_written) end_of_written = std::max(end_of_written, range.end);
    }
    return false;
}

// Whether only the list of arguments holds this tensor; other tensors may share its memory.
inline bool is_alone(PyObject* tensor) {
    return Py_REFCNT(tensor) == 1 && THPVariable_Unpack(tensor).use_count() == 1;
}

// The results as a list; the list of arguments is emptied, so that memory is free after its last use.
inline PyObject* run(const Program& program, PyObject* arguments) {
    size_t count = PyList_GET_SIZE(arguments);
    if (count != program.input_slots.size())
        fail("the program takes " + std::to_string(program.input_slots.size()) + " inputs, not " + std::to_string(count));
    Slots slots(program.slots);
    std::vector<c10::Storage> held;
    for (size_t i = 0; i < count; ++i) {
        PyObject* given = PyList_GET_ITEM(arguments, i);
        if (program.taken_over[i] && THPVariable_Check(given) && !is_alone(given))
            held.push_back(THPVariable_Unpack(given).storage());
        IValue value = from_python(PyList_GET_ITEM(arguments, i));
        if (program.inputs[i]) {
            if (!value.isTensor()) throw PlanMismatch(program.input_names[i] + " is no tensor");
            value = conform(value.toTensor(), *program.inputs[i], program.input_names[i]);
        }
        slots[program.input_slots[i]] = std::move(value);
    }
    if (PyList_SetSlice(arguments, 0, count, nullptr)) throw python_error();
    {
        py::gil_scoped_release free;
        run_steps(program, slots);
    }
    PyObject* results = PyList_New(program.output_slots.size());
    if (!results) throw python_error();
    for (size_t i = 0; i < program.output_slots.size(); ++i) {
        int slot = program.output_slots[i];
        py::object value = slot < 0 ? program.output_constants[i] : to_python(slots[slot]);
        PyList_SET_ITEM(results, i, value.release().ptr());
    }
    return results;
}

}  // namespace tilewright
