// Calls a compiled graph under autograd and records its node: in C++, what AOTAutograd's wrappers in Python do around a
// graph that needs nothing else of them (`tilewright.capture.plain_call`).
//
// Built from `tilewright.runtime.compiled_call`.

#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include "gradient.h"

namespace tilewright {

struct Tangent {
    int result;  // index of the result whose gradient this is
    std::optional<std::vector<int64_t>> strides;  // of the gradient that was traced
    at::MemoryFormat format;                      // of the gradient that was traced, if sizes change
    bool may_be_undefined;  // backward takes None for it, not zeros
};

struct CompiledCall {
    py::object forward, backward;  // take a list, which they may empty, and give a sequence; no backward for inference
    py::object otherwise;          // AOTAutograd's callable, for tensors and modes that this one does not know
    py::object stand_in;           // makes a result with AOTAutograd's own node from inputs and forward's values
    py::object mark;               // tells Dynamo which sizes of the results change, or null
    py::object second;             // gives gradients a history, from inputs and incoming gradients; null for inference
    std::vector<bool> are_tensors;  // the inputs; others are numbers
    std::vector<bool> is_differentiable;  // for each result
    std::vector<int> detached;            // inputs whose gradients are None
    std::vector<Tangent> tangents;
    size_t checked, unchecked;  // saved tensors with and without a version check, in this order; numbers follow
    bool disables_autocast, refuses_determinism;
};

using CompiledCallPointer = std::shared_ptr<const CompiledCall>;

inline bool in_functorch_transform() {
    return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Autograd's threads destroy nodes without Python's lock.
inline CompiledCallPointer owned(CompiledCall&& call) {
    return {new CompiledCall(std::move(call)), [](const CompiledCall* call) {
                if (!Py_IsInitialized()) return;
                py::gil_scoped_acquire held;
                delete call;
            }};
}

// The state in which a compiled graph runs: autograd sees it from outside, and casts were traced.
struct Inside {
    explicit Inside(const CompiledCall& call) {
        if (call.disables_autocast) autocast.emplace(c10::autocast_dispatch_keyset);
    }
    at::AutoGradMode no_gradients{false};
    c10::AutoFwGradMode no_tangents{false};
    std::optional<c10::impl::ExcludeDispatchKeyGuard> autocast;
};

[[noreturn]] inline void throw_python_error() {
    python_error error;
    error.persist();
    throw std::move(error);
}

inline py::object to_python(const Tensor& x) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(x));  // None where it is undefined
}

inline py::list list_of(const std::vector<IValue>& numbers, const variable_list& tensors) {
    py::list list(numbers.size() + tensors.size());
    for (size_t i = 0; i < numbers.size(); ++i) list[i] = to_python(numbers[i]);
    for (size_t i = 0; i < tensors.size(); ++i) list[numbers.size() + i] = to_python(tensors[i]);
    return list;
}

// A tensor over the same memory that is no view, and whose changes count as those of `x`.
inline Tensor not_a_view(const Tensor& x) {
    Tensor made = restrided(x, {x.sizes().vec(), x.strides().vec(), x.scalar_type(), x.device()});
    made.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
    return made;
}

// An input as it was at a call, which does not keep it.
struct Remembered {
    explicit Remembered(const Tensor& x) : tensor(x.getIntrusivePtr()), version(version_of(x)) {}
    explicit Remembered(IValue number) : tensor(Tensor().getIntrusivePtr()), version(0), number(std::move(number)) {}

    // None if it was freed or has changed.
    py::object recalled() const {
        if (!number.isNone()) return to_python(number);
        auto held = tensor.lock();
        if (!held) return py::none();
        Tensor x(std::move(held));
        return version_of(x) == version ? to_python(x) : py::none();
    }

    static uint32_t version_of(const Tensor& x) { return x.is_inference() ? 0 : x._version(); }

    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    uint32_t version;
    IValue number;
};

class CompiledNode : public torch::autograd::Node {
  public:
    explicit CompiledNode(CompiledCallPointer call) : call_(std::move(call)) {}

    std::string name() const override { return "CompiledFunctionBackward"; }
    bool is_aot_backward() const override { return true; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable& saved : saved_) saved.reset_data();
        unchecked_.clear();
        is_released_ = true;
    }

    void remember(PyObject* const* inputs, size_t count) {
        for (size_t i = 0; i < count; ++i)
            if (call_->are_tensors[i]) inputs_.emplace_back(THPVariable_Unpack(inputs[i]));
            else inputs_.emplace_back(from_python(inputs[i]));
    }

    // Saves `values`, which forward returned after its results; `results` already have this node as their history.
    void keep(PyObject* const* values, size_t count, const std::vector<Tensor>& results) {
        for (size_t i = 0; i < count; ++i) {
            if (i >= call_->checked + call_->unchecked) {
                numbers_.push_back(from_python(values[i]));
                continue;
            }
            const Tensor& x = THPVariable_Unpack(values[i]);
            Tensor kept = x.is_view() ? x.detach() : x;
            if (i >= call_->checked) {
                unchecked_.push_back(kept);
                continue;
            }
            bool is_result = std::any_of(results.begin(), results.end(), [&](const Tensor& y) { return y.is_same(x); });
            saved_.emplace_back(kept, is_result);
        }
    }

    variable_list apply(variable_list&& gradients) override {
        if (in_functorch_transform())
            fail("It looks like you're trying to call a compiled backward function within vmap/grad/vjp, which isn't "
                 "supported. Try wrapping vmap inside torch.compile, or skip compiling the backward function.");
        if (call_->refuses_determinism && at::globalContext().deterministicAlgorithms())
            fail("This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
                 "previously generated during the forward function while torch.use_deterministic_algorithms(False) was "
                 "set.");
        bool is_any = false;
        for (const Tensor& x : gradients) is_any = is_any || x.defined();
        if (!is_any) return variable_list(call_->are_tensors.size());
        variable_list taken = saved();
        bool creates_graph = at::GradMode::is_enabled();
        variable_list incoming = creates_graph ? gradients : variable_list();
        for (const Tangent& tangent : call_->tangents) taken.push_back(gradient_of(tangent, gradients));
        gradients.clear();
        if (!torch::autograd::get_current_graph_task_keep_graph()) release_variables();
        variable_list given = computed(std::move(taken));
        return creates_graph ? with_history(given, incoming) : given;
    }

    // Compiled autograd traces AOTAutograd's own node of the same values.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { stand_in()->compiled_args(args); }

    variable_list apply_with_saved(const variable_list& gradients,
                                   torch::dynamo::autograd::SwapSavedVariables& saved) override {
        variable_list found = stand_in()->apply_with_saved(gradients, saved), given;
        size_t place = 0;
        for (bool is_tensor : call_->are_tensors) given.push_back(is_tensor ? found[place++] : Tensor());
        return given;
    }

  private:
    // Hooks of saved tensors take Python's lock, so it is not held here.
    variable_list saved() const {
        std::lock_guard<std::mutex> lock(mutex_);
        TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
        variable_list tensors;
        tensors.reserve(saved_.size() + unchecked_.size() + call_->tangents.size());
        auto self = pointer_to<torch::autograd::Node>(const_cast<CompiledNode*>(this));
        for (const SavedVariable& x : saved_) tensors.push_back(x.unpack(self));
        tensors.insert(tensors.end(), unchecked_.begin(), unchecked_.end());
        return tensors;
    }

    Tensor gradient_of(const Tangent& tangent, variable_list& gradients) {
        Tensor gradient = std::move(gradients[tangent.result]);
        if (!gradient.defined()) {
            if (tangent.may_be_undefined) return gradient;
            gradient = input_metadata(tangent.result).zeros_like();
        }
        if (!tangent.strides) return gradient.contiguous(tangent.format);
        if (gradient.strides() == at::IntArrayRef(*tangent.strides)) return gradient;
        return at::empty_strided(gradient.sizes(), *tangent.strides, gradient.options()).copy_(gradient);
    }

    variable_list computed(variable_list&& taken) const {
        Inside inside(*call_);
        py::gil_scoped_acquire held;
        py::list arguments = list_of(numbers_, taken);
        for (size_t i = 1; i <= call_->tangents.size(); ++i) check_class(arguments[arguments.size() - i]);
        taken.clear();
        py::object results = call_backward(arguments);
        THPObjectPtr items(PySequence_Fast(results.ptr(), "a compiled backward gives a sequence"));
        if (!items) throw_python_error();
        variable_list given(call_->are_tensors.size());
        for (size_t i = 0; i < given.size(); ++i) {
            PyObject* x = PySequence_Fast_GET_ITEM(items.get(), i);
            if (call_->are_tensors[i] && x != Py_None) given[i] = THPVariable_Unpack(x);
        }
        return given;
    }

    // Runs backward in the Python context (contextvars) of the thread that started it, perhaps not this thread.
    py::object call_backward(const py::list& arguments) const {
        PyObject* made;
        if (at::impl::ThreadLocalPythonObjects::contains("context")) {
            static PyObject* const run = PyUnicode_InternFromString("run");
            auto context = at::impl::ThreadLocalPythonObjects::get("context");
            made = PyObject_CallMethodObjArgs(context->ptr(getPyInterpreter()), run, call_->backward.ptr(),
                                              arguments.ptr(), nullptr);
        } else {
            made = PyObject_CallOneArg(call_->backward.ptr(), arguments.ptr());
        }
        if (!made) throw_python_error();
        return py::reinterpret_steal<py::object>(made);
    }

    static void check_class(py::handle gradient) {
        if (gradient.is_none() || !THPVariable_Unpack(gradient.ptr()).key_set().has(c10::DispatchKey::Python)) return;
        std::string name = Py_TYPE(gradient.ptr())->tp_name;
        if (name != "FakeTensor")
            fail("During the backward, we encountered a tensor subclass where we guessed its metadata incorrectly. "
                 "Expected a plain Tensor, got: " + name);
    }

    variable_list with_history(const variable_list& gradients, const variable_list& incoming) const {
        py::gil_scoped_acquire held;
        py::list inputs(inputs_.size());
        bool is_lost = false;
        for (size_t i = 0; i < inputs_.size(); ++i) {
            inputs[i] = inputs_[i].recalled();
            is_lost = is_lost || inputs[i].is_none();
        }
        if (is_lost) return refused(gradients);
        PyObject* made = PyObject_CallFunctionObjArgs(call_->second.ptr(), list_of({}, gradients).ptr(), inputs.ptr(),
                                                      list_of({}, incoming).ptr(), nullptr);
        if (!made) throw_python_error();
        py::list results = py::reinterpret_steal<py::list>(made);
        variable_list given(results.size());
        for (size_t i = 0; i < given.size(); ++i)
            if (!results[i].is_none()) given[i] = THPVariable_Unpack(results[i].ptr());
        return given;
    }

    // An input was freed or has changed since the call: who differentiates these gradients gets an error.
    variable_list refused(const variable_list& gradients) const {
        auto error = shared<torch::autograd::Error>(
            std::string("torch.compile with aot_autograd does not currently support double backward: an input of the "
                        "call was freed or changed before"));
        error->set_next_edges(torch::autograd::edge_list(next_edges()));
        variable_list given;
        for (const Tensor& x : gradients) {
            // A gradient may be the incoming one itself, as that of a sum; the history of that one must not change.
            given.push_back(x.defined() ? x.detach() : x);
            if (x.defined()) torch::autograd::set_history(given.back(), error);
        }
        return given;
    }

    Tensor like_input(size_t i) const {
        const auto& edge = next_edge(i);
        if (!edge.is_valid()) return at::empty({0});
        return edge.function->input_metadata(edge.input_nr).zeros_like().set_requires_grad(true);
    }

    torch::autograd::Node* stand_in() const {
        if (!stand_in_.defined()) {
            variable_list values;
            for (size_t i = 0; i < call_->is_differentiable.size(); ++i)
                values.push_back(call_->is_differentiable[i] ? input_metadata(i).zeros_like() : at::empty({0}));
            for (const Tensor& x : saved()) values.push_back(x.detach());
            py::gil_scoped_acquire held;
            py::list inputs(call_->are_tensors.size()), computed = list_of({}, values);
            for (size_t i = 0; i < inputs.size(); ++i)
                inputs[i] = call_->are_tensors[i] ? to_python(like_input(i)) : py::object(py::int_(0));
            for (const IValue& number : numbers_) computed.append(to_python(number));
            PyObject* made =
                PyObject_CallFunctionObjArgs(call_->stand_in.ptr(), inputs.ptr(), computed.ptr(), nullptr);
            if (!made) throw_python_error();
            stand_in_ = THPVariable_Unpack(py::reinterpret_steal<py::object>(made).ptr());
        }
        return stand_in_.grad_fn().get();
    }

    CompiledCallPointer call_;
    mutable std::mutex mutex_;
    std::vector<SavedVariable> saved_;
    variable_list unchecked_;
    std::vector<IValue> numbers_;
    std::vector<Remembered> inputs_;
    bool is_released_ = false;
    mutable Tensor stand_in_;
};

// Whether the arguments are numbers, and tensors with memory that only reverse-mode autograd observes.
inline bool is_ordinary(const CompiledCall& call, PyObject* const* arguments, size_t count) {
    if (count != call.are_tensors.size() || in_functorch_transform() || !is_plain(arguments, count)) return false;
    for (size_t i = 0; i < count; ++i) {
        if (THPVariable_Check(arguments[i]) != call.are_tensors[i]) return false;
        if (call.are_tensors[i] && THPVariable_Unpack(arguments[i])._fw_grad(/*level=*/0).defined()) return false;
    }
    return true;
}

// Records a new node as the history of the results; its next nodes are the history of `inputs`.
inline void record(const CompiledCallPointer& call, PyObject* const* arguments, const variable_list& inputs,
                   PyObject* const* given, size_t count, PyObject* results) {
    auto node = shared<CompiledNode>(call);
    node->remember(arguments, inputs.size());
    auto edges = torch::autograd::collect_next_edges(inputs);
    for (int i : call->detached) edges[i] = torch::autograd::Edge();
    node->set_next_edges(std::move(edges));
    std::vector<Tensor> tracked;
    size_t first = call->is_differentiable.size();
    for (size_t i = 0; i < first; ++i) {
        if (!call->is_differentiable[i]) {
            node->add_input_metadata(torch::autograd::Node::undefined_input());
            continue;
        }
        Tensor x = THPVariable_Unpack(given[i]);
        if (x.is_view()) {
            x = not_a_view(x);
            PyList_SetItem(results, i, to_python(x).release().ptr());
        }
        torch::autograd::set_history(x, node);
        tracked.push_back(std::move(x));
    }
    node->keep(given + first, count - first, tracked);
}

// The results as a list.
inline PyObject* call_compiled(const CompiledCallPointer& call, PyObject* const* arguments, size_t count) {
    if (!is_ordinary(*call, arguments, count))
        return PyObject_Vectorcall(call->otherwise.ptr(), arguments, count, nullptr);
    py::list given(count);
    variable_list inputs(count);
    bool needs_gradients = false;
    for (size_t i = 0; i < count; ++i)
        if (call->are_tensors[i]) inputs[i] = THPVariable_Unpack(arguments[i]);
    if (call->backward) {
        for (int i : call->detached)
            if (inputs[i].requires_grad()) inputs[i] = inputs[i].detach();
        for (const Tensor& x : inputs) needs_gradients = needs_gradients || (x.defined() && x.requires_grad());
    }
    for (size_t i = 0; i < count; ++i)
        given[i] = call->are_tensors[i] ? to_python(inputs[i]) : py::reinterpret_borrow<py::object>(arguments[i]);
    std::vector<IValue> shown;
    at::RecordFunction recording(at::RecordScope::FUNCTION);
    if (call->backward && recording.isActive()) {
        for (const Tensor& x : inputs) shown.emplace_back(x);
        recording.before("CompiledFunction", c10::ArrayRef<const IValue>(shown.data(), shown.size()),
                         (int64_t)at::sequence_number::peek());
    }
    if (!needs_gradients) inputs.clear();
    PyObject* made;
    {
        Inside inside(*call);
        made = PyObject_CallOneArg(call->forward.ptr(), given.ptr());
    }
    if (!made) return nullptr;
    THPObjectPtr values(PySequence_List(made));
    Py_DECREF(made);
    if (!values) return nullptr;
    THPObjectPtr results(call->backward ? PyList_GetSlice(values.get(), 0, call->is_differentiable.size())
                                        : values.release());
    if (!results) return nullptr;
    if (needs_gradients)
        record(call, arguments, inputs, PySequence_Fast_ITEMS(values.get()), PyList_GET_SIZE(values.get()), results.get());
    if (call->mark) {
        PyObject* marked = PyObject_CallOneArg(call->mark.ptr(), results.get());
        if (!marked) return nullptr;
        Py_DECREF(marked);
    }
    return results.release();
}

}  // namespace tilewright
