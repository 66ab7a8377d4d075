// An own operator called eagerly: the recipe of each kind of call is built once, by Python, and performed here.
//
// Built by `tilewright.launch.eager`. A kind of call is what a recipe may depend on: shapes, strides, dtypes, device and
// address modulo LINE of each tensor, type and value of each other argument, and the precision of fp32 products.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "gradient.h"

namespace tilewright {

// What a call answers where it has no result; as in `eager.py`.
enum Answer : long {
    DISPATCH,  // something besides autograd must see the operator: call it by PyTorch's dispatcher
    RECORD,    // a gradient is wanted that Python computes: call it in a node of autograd's graph
    NO_RECIPE, // other code than kernels takes this kind of call
    NO_KEY     // Python looks for the recipe: this kind of call has no key
};

constexpr uintptr_t LINE = 128;     // as in `records/recipe.py`
constexpr size_t MOST_KINDS = 4096;

using Key = std::vector<int64_t>;

struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t mixed = 14695981039346656037u;  // FNV-1a, by words
        for (int64_t number : key) mixed = (mixed ^ (uint64_t)number) * 1099511628211u;
        return mixed ^ (mixed >> 29);
    }
};

struct Operator {
    bool has_one_result;
    py::object build;  // function from a call's arguments to its recipe, or None
    std::shared_ptr<const Gradient> gradient;  // null: Python computes it
    std::unordered_map<Key, std::shared_ptr<const Recipe>, Hash> recipes;  // null: there is none
};

// ---------------------------------------------------------------- who must see a call

inline uint64_t bits(c10::DispatchKeySet keys) { return keys.raw_repr(); }

// Whether autograd and profilers alone would see an operator that this thread calls now.
inline bool is_unobserved() {
    return !(bits(c10::impl::tls_local_dispatch_key_set().included_) & ~bits(c10::default_included_set)) &&
           !at::impl::torch_function_mode_enabled() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

inline bool records_gradients() {
    return at::GradMode::is_enabled() &&
           !(bits(c10::impl::tls_local_dispatch_key_set().excluded_) & bits(c10::autograd_dispatch_keyset));
}

// Dense memory on a CPU or a GPU, with no bit that changes what the memory means.
inline bool is_dense(const Tensor& x) {
    using c10::DispatchKey;
    static const uint64_t keys = bits(c10::DispatchKeySet(
        {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
         DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}));
    return !(bits(x.key_set()) & ~keys);
}

// Collects the tensors among the arguments; false if one is not dense or, with `exact`, is of a subclass.
inline bool collect(PyObject* const* arguments, Py_ssize_t count, bool exact, Tensors& tensors) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!THPVariable_Check(arguments[i])) continue;
        const Tensor& x = THPVariable_Unpack(arguments[i]);
        if ((exact && !THPVariable_CheckTypeExact(Py_TYPE(arguments[i]))) || !is_dense(x)) return false;
        tensors.push_back(x);
    }
    return true;
}

// ---------------------------------------------------------------- kinds of calls

enum Sort : int64_t { TENSOR = 1, NONE, TRUTH, INTEGER, FLOATING, TEXT, INTEGERS };

inline void add_tensor(Key& key, const Tensor& x) {
    key.insert(key.end(), {TENSOR, (int64_t)x.scalar_type(), (int64_t)x.device().type(), x.device().index(),
                           (int64_t)(address(x) % LINE), x.dim()});
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
}

// Adds an argument that is no tensor; false if it is of no `Sort`.
inline bool add_option(Key& key, PyObject* x) {
    if (x == Py_None) {
        key.push_back(NONE);
    } else if (PyBool_Check(x)) {
        key.insert(key.end(), {TRUTH, x == Py_True});
    } else if (PyLong_CheckExact(x)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
        if (overflow) return false;
        key.insert(key.end(), {INTEGER, value});
    } else if (PyFloat_CheckExact(x)) {
        double value = PyFloat_AS_DOUBLE(x);
        int64_t number;
        memcpy(&number, &value, sizeof number);
        key.insert(key.end(), {FLOATING, number});
    } else if (PyUnicode_CheckExact(x)) {
        Py_ssize_t length;
        const char* text = PyUnicode_AsUTF8AndSize(x, &length);
        if (!text) throw python_error();
        key.insert(key.end(), {TEXT, length});
        for (Py_ssize_t i = 0; i < length; ++i) key.push_back(text[i]);
    } else if (PyList_CheckExact(x) || PyTuple_Check(x)) {
        Py_ssize_t length = PySequence_Fast_GET_SIZE(x);
        key.insert(key.end(), {INTEGERS, length});
        for (Py_ssize_t i = 0; i < length; ++i)
            if (!PyLong_CheckExact(PySequence_Fast_GET_ITEM(x, i)) || !add_option(key, PySequence_Fast_GET_ITEM(x, i)))
                return false;
    } else {
        return false;
    }
    return true;
}

inline bool key_of(PyObject* const* arguments, Py_ssize_t count, const Tensors& tensors, Key& key) {
    key.reserve(64);
    try {
        key.push_back((int64_t)at::globalContext().float32MatmulPrecision());
    } catch (const c10::Error&) {
        // It has no answer where `fp32_precision` of a backend says otherwise.
        return false;
    }
    const Tensor* next = tensors.begin();
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (THPVariable_Check(arguments[i]))
            add_tensor(key, *next++);
        else if (!add_option(key, arguments[i]))
            return false;
    }
    return true;
}

// ---------------------------------------------------------------- a call

constexpr const char* RECIPE_NAME = "tilewright.recipe";

inline std::shared_ptr<const Recipe> recipe_in(py::handle capsule) {
    auto* found = (std::shared_ptr<const Recipe>*)PyCapsule_GetPointer(capsule.ptr(), RECIPE_NAME);
    if (!found) throw python_error();
    return *found;
}

// The recipe of this kind of call; a new kind's recipe is built now if `may_build`, else null.
inline std::shared_ptr<const Recipe> recipe_of(Operator& op, Key&& key, PyObject* const* arguments, Py_ssize_t count,
                                               bool may_build) {
    auto found = op.recipes.find(key);
    if (found != op.recipes.end()) return found->second;
    if (!may_build) return nullptr;
    auto built = py::reinterpret_steal<py::object>(PyObject_Vectorcall(op.build.ptr(), arguments, count, nullptr));
    if (!built) throw python_error();
    auto recipe = built.is_none() ? nullptr : recipe_in(built);
    if (op.recipes.size() >= MOST_KINDS) op.recipes.clear();
    op.recipes.insert_or_assign(std::move(key), recipe);
    return recipe;
}

// Appends the recipe's buffers to `tensors`, which holds the inputs, and performs its actions.
inline void allocate_and_perform(const Recipe& recipe, Tensors& tensors) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::DeviceGuard on_device(recipe.device);
    for (const Layout& layout : recipe.buffers) tensors.push_back(empty(layout));
    perform(recipe, tensors);
}

using Results = c10::SmallVector<Tensor, 4>;

enum class Caller {
    USER,     // a profiler records the call; the dispatcher converts arguments of sorts that no key has
    CHECKING, // as USER, but builds no recipe for a new kind, whose arguments must be checked first
    PYTORCH   // the dispatcher or autograd have seen the call
};

// Fills `results`, or returns an Answer and leaves them empty.
inline std::optional<Answer> performed(Operator& op, PyObject* const* arguments, Py_ssize_t count, Tensors& tensors,
                                       Caller caller, Results& results) {
    Key key;
    if (tensors.empty()) return NO_RECIPE;
    if (!key_of(arguments, count, tensors, key)) return caller == Caller::PYTORCH ? NO_KEY : DISPATCH;
    auto recipe = recipe_of(op, std::move(key), arguments, count, caller != Caller::CHECKING);
    // Each replay of a captured CUDA graph must draw anew, which a recipe cannot.
    if (!recipe || is_captured_draw(*recipe)) return NO_RECIPE;
    size_t first = tensors.size();
    {
        py::gil_scoped_release free;
        if (caller != Caller::PYTORCH) {
            RECORD_FUNCTION(recipe->name.c_str(), std::vector<IValue>(tensors.begin(), tensors.end()));
            allocate_and_perform(*recipe, tensors);
        } else {
            allocate_and_perform(*recipe, tensors);
        }
    }
    for (int result : recipe->results) results.push_back(std::move(tensors[first + result]));
    return std::nullopt;
}

inline PyObject* wrapped(const Operator& op, const Results& results) {
    if (results.empty()) Py_RETURN_NONE;
    if (op.has_one_result) return THPVariable_Wrap(results[0]);
    PyObject* made = PyTuple_New(results.size());
    if (!made) throw python_error();
    for (size_t i = 0; i < results.size(); ++i) PyTuple_SET_ITEM(made, i, THPVariable_Wrap(results[i]));
    return made;
}

// The results of a call by the user, or an Answer.
inline PyObject* call_eagerly(Operator& op, PyObject* const* arguments, Py_ssize_t count, Caller caller) {
    Tensors tensors;
    if (!is_unobserved() || !collect(arguments, count, true, tensors)) return PyLong_FromLong(DISPATCH);
    bool is_recorded = false;
    if (records_gradients())
        for (const Tensor& x : tensors) is_recorded = is_recorded || x.requires_grad();
    if (is_recorded && !op.gradient) return PyLong_FromLong(RECORD);
    variable_list inputs;
    if (is_recorded) inputs.assign(tensors.begin(), tensors.end());
    Results results;
    if (auto answer = performed(op, arguments, count, tensors, caller, results))
        return PyLong_FromLong(is_recorded && *answer == NO_RECIPE ? RECORD : *answer);
    if (is_recorded) record(op.gradient, arguments, inputs, results);
    return wrapped(op, results);
}

// The results of a call below autograd, or NO_RECIPE, or NO_KEY.
inline PyObject* call_below_autograd(Operator& op, PyObject* const* arguments, Py_ssize_t count) {
    Tensors tensors;
    Results results;
    if (!collect(arguments, count, false, tensors)) return PyLong_FromLong(NO_RECIPE);
    if (auto answer = performed(op, arguments, count, tensors, Caller::PYTORCH, results)) return PyLong_FromLong(*answer);
    return wrapped(op, results);
}

}  // namespace tilewright
