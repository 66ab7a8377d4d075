// Operators called eagerly without Python: what a call of a kind was seen to allocate and to launch, done again.
//
// Python takes 30 to 90 µs to find a kernel and launch it, longer than most kernels of a small model run. `repeat.py`
// watches one call of a kind; the next ones of that kind end here.

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using Key = std::vector<int64_t>;
using Tensors = c10::SmallVector<Tensor, 8>;

// What `call` answers where it does not give the result; numbers as in `eager.py`.
enum Answer : long { WATCHED, TRAINED, NEW, SEEN };

constexpr int INVALID_CONTEXT = 201;
constexpr size_t MOST_KINDS = 4096;

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*make_current)(void*);
    int (*capturing)(void*, int*);
    int (*stream_of)(int32_t, void**);
    void* context;
};

struct Made {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    uintptr_t within;  // a line, where the recorded one began
};

enum Place : int64_t { OFFSET = -3, SEED, NUMBER };  // as in `repeat.py`

struct Parameter {
    int64_t tensor;  // of the arguments, then of those made; or a Place
    uint64_t value;  // the number, or what is added to the address
};

struct Launch {
    void* function;
    unsigned grid[3], threads, shared_bytes;
    std::vector<Parameter> parameters;
};

struct Chain {
    Driver driver;
    bool refused, single;
    size_t results;  // of those made, the first
    std::vector<Made> made;
    std::vector<Launch> launches;
    uint64_t advance;  // of the default generator; 0: nothing is drawn
};

struct Drawn {
    uint64_t seed = 0, offset = 0;
};

struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t mixed = 14695981039346656037u;  // FNV-1a, by words
        for (int64_t number : key) mixed = (mixed ^ (uint64_t)number) * 1099511628211u;
        return mixed ^ (mixed >> 29);
    }
};

struct Operator {
    std::string name;
    bool repeats;
    uintptr_t line;  // bytes: where tensors begin within one matters, and where they lie beyond that does not
    std::unordered_map<Key, std::shared_ptr<const Chain>, Hash> kinds;  // null: seen, without a chain
};

uintptr_t address(const Tensor& x) { return (uintptr_t)x.const_data_ptr(); }

// ---------------------------------------------------------------- who watches

uint64_t bits(DispatchKeySet keys) { return keys.raw_repr(); }

const uint64_t PLAIN = bits(DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                                            DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView,
                                            DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}));

// Whether nothing but autograd, and profilers, would see an operator called now by this thread.
bool alone() {
    return !(bits(c10::impl::tls_local_dispatch_key_set().included_) & ~bits(c10::default_included_set)) &&
           !at::impl::torch_function_mode_enabled() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool records_gradients() {
    return at::GradMode::is_enabled() &&
           !(bits(c10::impl::tls_local_dispatch_key_set().excluded_) & bits(c10::autograd_dispatch_keyset));
}

// The tensors among the arguments; false where one is of a class or a kind of its own.
bool plain(PyObject* const* arguments, Py_ssize_t count, Tensors& tensors) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!THPVariable_Check(arguments[i])) continue;
        const Tensor& x = THPVariable_Unpack(arguments[i]);
        if (!THPVariable_CheckTypeExact(Py_TYPE(arguments[i])) || (bits(x.key_set()) & ~PLAIN)) return false;
        tensors.push_back(x);
    }
    return true;
}

// ---------------------------------------------------------------- kinds of calls

enum Sort : int64_t { TENSOR = 1, NONE, TRUTH, INTEGER, FLOATING, TEXT };

void add(Key& key, const Tensor& x, uintptr_t line) {
    key.insert(key.end(), {TENSOR, (int64_t)x.scalar_type(), (int64_t)x.device().type(), x.device().index(),
                           (int64_t)(address(x) % line), x.dim()});
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
}

bool add(Key& key, PyObject* x) {
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
    } else {
        return false;
    }
    return true;
}

// What tells kinds of calls apart; false where an argument is of no known sort.
bool key_of(PyObject* const* arguments, Py_ssize_t count, const Tensors& tensors, uintptr_t line, Key& key) {
    key.reserve(64);
    const Tensor* next = tensors.begin();
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (THPVariable_Check(arguments[i]))
            add(key, *next++, line);
        else if (!add(key, arguments[i]))
            return false;
    }
    return true;
}

// Whether addresses tell the arguments apart.
bool distinct(const Tensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            if (tensors[i].numel() && address(tensors[i]) == address(tensors[j])) return false;
    return true;
}

// ---------------------------------------------------------------- doing it again

// Seed and offset of the device's default generator, which moves on.
Drawn draw(uint64_t advance, at::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    Drawn drawn{generator.current_seed(), generator.get_offset()};
    generator.set_offset(drawn.offset + advance);
    return drawn;
}

uint64_t value_of(const Parameter& given, const Tensors& tensors, const Drawn& drawn) {
    switch (given.tensor) {
        case NUMBER: return given.value;
        case SEED: return drawn.seed;
        case OFFSET: return drawn.offset;
        default: return address(tensors[given.tensor]) + given.value;
    }
}

void send(const Chain& chain, const Tensors& tensors, const Drawn& drawn, void* stream) {
    const Driver& driver = chain.driver;
    for (const Launch& x : chain.launches) {
        c10::SmallVector<uint64_t, 32> values(x.parameters.size());
        c10::SmallVector<void*, 32> places(x.parameters.size());
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = value_of(x.parameters[i], tensors, drawn);
            places[i] = &values[i];
        }
        auto once = [&] {
            return driver.launch(x.function, x.grid[0], x.grid[1], x.grid[2], x.threads, 1, 1, x.shared_bytes, stream,
                                 places.data(), nullptr);
        };
        int status = once();
        // A thread that has done nothing on the device yet.
        if (status == INVALID_CONTEXT && driver.make_current(driver.context) == 0) status = once();
        TORCH_CHECK(status == 0, "the driver refuses a launch of a kernel: CUDA error ", status);
    }
}

// Allocates and launches; false where nothing was launched: memory begins elsewhere within a line than it did, or a
// graph is captured, of which each replay draws by itself.
bool again(const Operator& op, const Chain& chain, Tensors& tensors) {
    RECORD_FUNCTION(op.name.c_str(), std::vector<c10::IValue>(tensors.begin(), tensors.end()));
    at::AutoDispatchBelowADInplaceOrView below;
    c10::DeviceGuard here(tensors[0].device());
    auto options = at::TensorOptions().device(tensors[0].device());
    for (const Made& x : chain.made) {
        tensors.push_back(at::empty_strided(x.sizes, x.strides, options.dtype(x.dtype)));
        if (address(tensors.back()) % op.line != x.within) return false;
    }
    if (chain.launches.empty()) return true;
    void* stream = nullptr;
    TORCH_CHECK(chain.driver.stream_of(tensors[0].device().index(), &stream) == 0, "PyTorch gives no current stream");
    Drawn drawn;
    if (chain.advance) {
        int captured = 0;
        if (chain.driver.capturing(stream, &captured) || captured) return false;
        drawn = draw(chain.advance, tensors[0].device());
    }
    send(chain, tensors, drawn, stream);
    return true;
}

PyObject* wrapped(const Chain& chain, const Tensors& tensors) {
    size_t first = tensors.size() - chain.made.size();
    if (chain.single) return THPVariable_Wrap(tensors[first]);
    PyObject* results = PyTuple_New(chain.results);
    if (!results) throw python_error();
    for (size_t i = 0; i < chain.results; ++i) PyTuple_SET_ITEM(results, i, THPVariable_Wrap(tensors[first + i]));
    return results;
}

// The result by the chain of this kind, or an answer.
PyObject* repeated(Operator& op, PyObject* const* arguments, Py_ssize_t count, Tensors& tensors) {
    Key key;
    if (!op.repeats || tensors.empty() || !key_of(arguments, count, tensors, op.line, key)) return PyLong_FromLong(NEW);
    auto found = op.kinds.find(key);
    if (found == op.kinds.end()) {
        if (op.kinds.size() >= MOST_KINDS) op.kinds.clear();
        op.kinds.emplace(std::move(key), nullptr);
        return PyLong_FromLong(NEW);
    }
    // Let go by nobody while it runs, though another thread may forget all kinds.
    auto chain = found->second;
    if (!chain) return PyLong_FromLong(distinct(tensors) ? SEEN : NEW);
    if (chain->refused) return PyLong_FromLong(NEW);
    bool done;
    {
        pybind11::gil_scoped_release free;
        done = again(op, *chain, tensors);
    }
    return done ? wrapped(*chain, tensors) : PyLong_FromLong(NEW);
}

// ---------------------------------------------------------------- to Python

constexpr const char* NAME = "tilewright.repeat.operator";

Operator& operator_in(PyObject* capsule) {
    auto* found = (Operator*)PyCapsule_GetPointer(capsule, NAME);
    if (!found) throw python_error();
    return *found;
}

// operator(name, repeats, bytes of a line) -> operator
PyObject* make_operator(PyObject*, PyObject* const* arguments, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* made = new Operator{PyUnicode_AsUTF8(arguments[0]), arguments[1] == Py_True, PyLong_AsSize_t(arguments[2]), {}};
    return PyCapsule_New(made, NAME, [](PyObject* x) { delete (Operator*)PyCapsule_GetPointer(x, NAME); });
    END_HANDLE_TH_ERRORS
}

// call(operator, *arguments) -> the result, or an Answer
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    Operator& op = operator_in(arguments[0]);
    Tensors tensors;
    if (!alone() || !plain(arguments + 1, count - 1, tensors)) return PyLong_FromLong(WATCHED);
    if (records_gradients())
        for (const Tensor& x : tensors)
            if (x.requires_grad()) return PyLong_FromLong(TRAINED);
    return repeated(op, arguments + 1, count - 1, tensors);
    END_HANDLE_TH_ERRORS
}

// below(operator, *arguments) -> as `call` of a call that was looked at already, and of which autograd learns nothing
PyObject* below(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    Operator& op = operator_in(arguments[0]);
    Tensors tensors;
    if (!plain(arguments + 1, count - 1, tensors)) return PyLong_FromLong(NEW);
    return repeated(op, arguments + 1, count - 1, tensors);
    END_HANDLE_TH_ERRORS
}

void fill(Chain& chain, const pybind11::tuple& told) {
    namespace py = pybind11;
    auto driver = told[0].cast<std::array<uint64_t, 5>>();
    static_assert(sizeof chain.driver == sizeof driver);
    memcpy(&chain.driver, driver.data(), sizeof driver);
    chain.single = told[1].cast<bool>();
    chain.results = told[2].cast<size_t>();
    for (py::handle x : told[3]) {
        auto made = py::reinterpret_borrow<py::tuple>(x);
        chain.made.push_back({made[0].cast<std::vector<int64_t>>(), made[1].cast<std::vector<int64_t>>(),
                              ((THPDtype*)made[2].ptr())->scalar_type, made[3].cast<uintptr_t>()});
    }
    for (py::handle x : told[4]) {
        auto sent = py::reinterpret_borrow<py::tuple>(x);
        auto grid = sent[1].cast<std::array<unsigned, 3>>();
        Launch launch{(void*)sent[0].cast<uint64_t>(), {grid[0], grid[1], grid[2]}, sent[2].cast<unsigned>(),
                      sent[3].cast<unsigned>(), {}};
        for (auto [tensor, value] : sent[4].cast<std::vector<std::pair<int64_t, uint64_t>>>())
            launch.parameters.push_back({tensor, value});
        chain.launches.push_back(std::move(launch));
    }
    chain.advance = told[5].cast<uint64_t>();
}

// keep(operator, chain, *arguments): the chain of this kind of call, as `Chain.told` of `repeat.py`; None: it has none
PyObject* keep(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    namespace py = pybind11;
    Operator& op = operator_in(arguments[0]);
    Tensors tensors;
    Key key;
    if (!plain(arguments + 2, count - 2, tensors) || !key_of(arguments + 2, count - 2, tensors, op.line, key))
        Py_RETURN_NONE;
    auto chain = std::make_shared<Chain>();
    chain->refused = arguments[1] == Py_None;
    if (!chain->refused) fill(*chain, py::reinterpret_borrow<py::tuple>(arguments[1]));
    op.kinds[std::move(key)] = std::move(chain);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"operator", (PyCFunction)(void*)make_operator, METH_FASTCALL, nullptr},
    {"call", (PyCFunction)(void*)call, METH_FASTCALL, nullptr},
    {"below", (PyCFunction)(void*)below, METH_FASTCALL, nullptr},
    {"keep", (PyCFunction)(void*)keep, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilewright_repeat", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tilewright_repeat() { return PyModule_Create(&module); }
