// Attention called eagerly, with its gradient, without Python: results and scratch are allocated, the launches of
// `hopper/chain.py` are filled in and sent to the driver, and a node of autograd's graph does the same for the
// backward.
//
// A training step of a small attention takes the GPU less time than Python takes to describe it. What is not done
// here, a gradient of lse or of the gradient, goes to a Python function that does it all.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// Layouts as in `hopper/chain.py` and `native.py`.
constexpr int BYTES = 2048, PATCHES = 48, MAPS = 8, PARAMETERS = 64, LAUNCHES = 3, RANK = 4;
constexpr int MAP_ALIGNMENT = 64;

struct Launch {
    void* function;
    int32_t grid[3], threads, shared_bytes, first;
};

struct Patch {
    int32_t at, value;
    int64_t added;
};

struct Map {
    int32_t at, value, steps, kind;
    uint32_t box[RANK];
    uint64_t sizes[RANK], nbytes[RANK - 1];
};

struct Chain {
    int32_t nbytes, patches, maps, parameters, launches, unused;
    Patch patch[PATCHES];
    Map map[MAPS];
    int32_t parameter[PARAMETERS];
    Launch launch[LAUNCHES];
    uint8_t image[BYTES];
};

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                  int, int, int);
    int (*make_current)(void*);
    int (*stream_of)(int32_t, void**);
    void* context;
};

struct Lies {
    int64_t sizes[RANK], strides[RANK];
};

enum { OUT, DQ, DK, DV, TENSORS };

struct Course {
    Driver driver;
    Chain forward, backward;
    Lies tensor[TENSORS];
    int64_t scratch;  // numbers that the backward takes; -1: it is not one of ours
    uint64_t sink;    // where a log-sum-exp goes that nobody asked for, or null
};

constexpr int SWIZZLE_128B = 3, PROMOTE_TO_256B = 3;
constexpr uint64_t ALONE_BYTES = 128;  // a stride that is never taken, along an axis of one

void encode(const Chain& chain, const Driver& driver, const uint64_t* values, char* image) {
    static const uint32_t ones[RANK] = {1, 1, 1, 1};
    for (int i = 0; i < chain.maps; ++i) {
        const Map& map = chain.map[i];
        uint64_t nbytes[RANK - 1];
        for (int axis = 0; axis < RANK - 1; ++axis) {
            bool alone = map.sizes[axis + 1] == 1;
            uint64_t given = map.steps < 0 ? map.nbytes[axis] : 2 * values[map.steps + RANK - 2 - axis];
            nbytes[axis] = alone ? ALONE_BYTES : given;
        }
        int status = driver.encode(image + map.at, map.kind, RANK, (void*)values[map.value], map.sizes, nbytes, map.box,
                                   ones, 0, SWIZZLE_128B, PROMOTE_TO_256B, 0);
        TORCH_CHECK(status == 0, "the driver refuses a tensor map of attention: CUDA error ", status);
    }
}

// Autograd's threads have none at first, and the driver dies of a tensor map that is encoded without one.
void have_context(const Driver& driver) {
    thread_local void* made = nullptr;
    if (made == driver.context) return;
    TORCH_CHECK(driver.make_current(driver.context) == 0, "the driver gives a thread no context");
    made = driver.context;
}

void run(const Chain& chain, const Driver& driver, const uint64_t* values, c10::DeviceIndex device) {
    alignas(MAP_ALIGNMENT) char image[BYTES];
    void* parameters[PARAMETERS];
    void* stream = nullptr;
    memcpy(image, chain.image, chain.nbytes);
    for (int i = 0; i < chain.patches; ++i) {
        uint64_t number = values[chain.patch[i].value] + chain.patch[i].added;
        memcpy(image + chain.patch[i].at, &number, sizeof number);
    }
    have_context(driver);
    encode(chain, driver, values, image);
    for (int i = 0; i < chain.parameters; ++i) parameters[i] = image + chain.parameter[i];
    TORCH_CHECK(driver.stream_of(device, &stream) == 0, "PyTorch gives no current stream");
    for (int i = 0; i < chain.launches; ++i) {
        const Launch& x = chain.launch[i];
        int status = driver.launch(x.function, x.grid[0], x.grid[1], x.grid[2], x.threads, 1, 1, x.shared_bytes, stream,
                                   parameters + x.first, nullptr);
        TORCH_CHECK(status == 0, "the driver refuses a launch of attention: CUDA error ", status);
    }
}

uint64_t address(const at::Tensor& x) { return (uint64_t)x.data_ptr(); }

at::Tensor empty(const Lies& lies, const at::Tensor& like) {
    return at::empty_strided(lies.sizes, lies.strides, like.options());
}

at::Tensor numbers(at::IntArrayRef sizes, const at::Tensor& like) {
    return at::empty(sizes, like.options().dtype(at::kFloat));
}

using at::Tensor;
using torch::autograd::variable_list;

// out, and lse where it is `kept`.
std::pair<Tensor, Tensor> forward(const Course& course, const Tensor& q, const Tensor& k, const Tensor& v,
                                  bool kept) {
    c10::DeviceGuard guard(q.device());
    Tensor lse, out = empty(course.tensor[OUT], q);
    if (kept || !course.sink) lse = numbers({course.tensor[OUT].sizes, 3}, q);
    uint64_t sums = lse.defined() ? address(lse) : course.sink;
    const uint64_t values[] = {address(q), address(k), address(v), address(out), sums};
    run(course.forward, course.driver, values, q.device().index());
    return {out, lse};
}

// As bulk copies and vectors take it: neighbouring columns, and rows that begin at multiples of 16 bytes.
bool readable(const Tensor& dout) {
    constexpr int64_t VECTOR_BYTES = 16, VECTOR = VECTOR_BYTES / 2;
    auto step = [&](int axis) { return dout.stride(axis) > 0 && dout.stride(axis) % VECTOR == 0; };
    return dout.stride(3) == 1 && step(0) && step(1) && step(2) && address(dout) % VECTOR_BYTES == 0;
}

bool takes(const Course& course, const Tensor& dout) {
    return course.scratch >= 0 && dout.defined() && !at::GradMode::is_enabled();
}

std::array<Tensor, 3> backward(const Course& course, const Tensor& given, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& lse) {
    c10::DeviceGuard guard(q.device());
    // The gradient of a sum repeats along its axes.
    Tensor dout = readable(given) ? given : given.clone(at::MemoryFormat::Contiguous);
    Tensor dq = empty(course.tensor[DQ], q), dk = empty(course.tensor[DK], q), dv = empty(course.tensor[DV], q);
    Tensor scratch = numbers({course.scratch}, q);
    uint64_t values[10 + 3 * 5];
    uint64_t* next = values;
    for (const Tensor& x : {q, k, v, lse, out, dout, dq, dk, dv, scratch}) *next++ = address(x);
    for (const Tensor& x : {out, dout, dq, dk, dv})
        for (int axis = 0; axis < 3; ++axis) *next++ = x.stride(axis);
    run(course.backward, course.driver, values, q.device().index());
    return {dq, dk, dv};
}

// A course, and the Python function for what is not done here; let go on any thread.
struct Kept : torch::CustomClassHolder {
    Course course;
    PyObject* otherwise;
    Kept(const Course& course, PyObject* function) : course(course), otherwise(function) { Py_INCREF(function); }
    ~Kept() override {
        if (!Py_IsInitialized()) return;
        pybind11::gil_scoped_acquire gil;
        Py_DECREF(otherwise);
    }
};
using Handle = c10::intrusive_ptr<Kept>;

pybind11::object wrapped(const Tensor& x) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x)); }

variable_list ask(PyObject* function, const Tensor& dout, const Tensor& dlse, const variable_list& saved) {
    pybind11::gil_scoped_acquire gil;
    pybind11::tuple arguments(2 + saved.size());
    arguments[0] = wrapped(dout), arguments[1] = wrapped(dlse);
    for (size_t i = 0; i < saved.size(); ++i) arguments[2 + i] = wrapped(saved[i]);
    PyObject* results = PyObject_CallObject(function, arguments.ptr());
    if (!results) {
        python_error error;
        error.persist();
        throw std::move(error);
    }
    auto owned = pybind11::reinterpret_steal<pybind11::tuple>(results);
    variable_list given{Tensor()};
    for (int i = 0; i < 3; ++i) given.push_back(THPVariable_Unpack(pybind11::object(owned[i]).ptr()));
    return given;
}

constexpr const char* COURSE = "course";

struct TilewrightAttention : torch::autograd::Function<TilewrightAttention> {
    static variable_list forward(torch::autograd::AutogradContext* context, const Handle& kept, const Tensor& q,
                                 const Tensor& k, const Tensor& v, bool with_lse) {
        at::AutoDispatchBelowADInplaceOrView below;
        auto [out, lse] = ::forward(kept->course, q, k, v, true);
        context->set_materialize_grads(false);
        context->save_for_backward({q, k, v, out, lse});
        context->saved_data[COURSE] = c10::IValue::make_capsule(kept);
        return with_lse ? variable_list{out, lse} : variable_list{out};
    }

    static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
        const Tensor& dout = gradients[0];
        Tensor dlse = gradients.size() > 1 ? gradients[1] : Tensor();
        // The first of what forward was given is no tensor, nor is the last.
        if (!dout.defined() && !dlse.defined()) return variable_list(5);
        auto capsule = context->saved_data[COURSE].toCapsule();
        auto* kept = static_cast<Kept*>(capsule.get());
        auto saved = context->get_saved_variables();
        variable_list given;
        if (dlse.defined() || !takes(kept->course, dout)) {
            given = ask(kept->otherwise, dout, dlse, saved);
        } else {
            at::AutoDispatchBelowADInplaceOrView below;
            auto [dq, dk, dv] = ::backward(kept->course, dout, saved[0], saved[1], saved[2], saved[3], saved[4]);
            given = {Tensor(), dq, dk, dv};
        }
        given.emplace_back();
        return given;
    }
};

constexpr const char* NAME = "tilewright.attention.course";

const Handle& handle(PyObject* capsule) {
    void* found = PyCapsule_GetPointer(capsule, NAME);
    if (!found) throw python_error();
    return *static_cast<Handle*>(found);
}

// course(address of a Course, function for what is not done here) -> course
PyObject* course(PyObject*, PyObject* const* arguments, Py_ssize_t) {
    HANDLE_TH_ERRORS
    auto* given = (const Course*)PyLong_AsVoidPtr(arguments[0]);
    auto* made = new Handle(c10::make_intrusive<Kept>(*given, arguments[1]));
    return PyCapsule_New(made, NAME, [](PyObject* x) { delete static_cast<Handle*>(PyCapsule_GetPointer(x, NAME)); });
    END_HANDLE_TH_ERRORS
}

// attend(course, q, k, v, with_lse) -> out, or (out, lse)
PyObject* attend(PyObject*, PyObject* const* arguments, Py_ssize_t) {
    HANDLE_TH_ERRORS
    Handle kept = handle(arguments[0]);
    Tensor q = THPVariable_Unpack(arguments[1]), k = THPVariable_Unpack(arguments[2]);
    Tensor v = THPVariable_Unpack(arguments[3]), out, lse;
    bool with_lse = arguments[4] == Py_True;
    {
        pybind11::gil_scoped_release free;
        RECORD_FUNCTION("tilewright::attention", std::vector<c10::IValue>({q, k, v}));
        bool trained = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
        bool forward_mode = q._fw_grad(0).defined() || k._fw_grad(0).defined() || v._fw_grad(0).defined();
        if (trained || forward_mode) {
            auto given = TilewrightAttention::apply(kept, q, k, v, with_lse);
            out = given[0], lse = with_lse ? given[1] : Tensor();
        } else {
            at::AutoDispatchBelowADInplaceOrView below;
            std::tie(out, lse) = forward(kept->course, q, k, v, with_lse);
        }
    }
    if (!with_lse) return THPVariable_Wrap(out);
    return pybind11::make_tuple(wrapped(out), wrapped(lse)).release().ptr();
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"course", (PyCFunction)(void*)course, METH_FASTCALL, nullptr},
    {"attend", (PyCFunction)(void*)attend, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilewright_attention", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tilewright_attention() { return PyModule_Create(&module); }
