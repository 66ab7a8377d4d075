// The node of an operator in autograd's graph: its gradient is one call of another operator, by `EagerOperator.call`.
//
// Built from `tilewright.launch.gradient`.

#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "program.h"

namespace tilewright {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum TakenKind : int { GRAD, GIVEN, IS_GIVEN, KEPT, CONSTANT_ARGUMENT };  // as in `gradient.py`

struct Taken {
    int kind, index;
    py::object constant;  // GRAD: whether an undefined gradient is passed as None
};

struct Gradient {
    std::string name;
    py::object call;
    std::vector<Taken> takes;
    std::vector<int> gives;  // for each argument of the forward: which result of `call` is its gradient, or -1
    size_t differentiable;
};

// PyTorch 2.11 shares nodes by std::shared_ptr, 2.13 by c10::intrusive_ptr.
template <class Node>
constexpr bool is_intrusive = std::is_base_of_v<c10::intrusive_ptr_target, Node>;

template <class Node>
auto pointer_to(Node* node) {
    if constexpr (is_intrusive<Node>)
        return c10::intrusive_ptr<Node>::reclaim_copy(node);
    else
        return node->shared_from_this();
}

template <class Node, class Argument>
auto shared(Argument argument) {
    if constexpr (is_intrusive<Node>)
        return c10::make_intrusive<Node>(std::move(argument));
    else
        return std::shared_ptr<Node>(new Node(std::move(argument)), [](auto* node) { deleteNode(node); });
}

class GradientNode : public torch::autograd::Node {
  public:
    explicit GradientNode(std::shared_ptr<const Gradient> gradient) : gradient_(std::move(gradient)) {}

    ~GradientNode() override {
        if (!Py_IsInitialized()) {
            // Python has ended and can no longer free its objects: leak them.
            for (py::object& value : values_) value.release();
            new std::shared_ptr<const Gradient>(std::move(gradient_));
            return;
        }
        py::gil_scoped_acquire held;
        values_.clear();
        gradient_.reset();
    }

    std::string name() const override { return gradient_->name; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable& saved : saved_) saved.reset_data();
    }

    // Saves what the gradient's call takes. Call it once this node is the history of the results.
    void keep(PyObject* const* arguments, const c10::SmallVector<Tensor, 4>& results) {
        for (const Taken& taken : gradient_->takes) {
            py::handle given = taken.kind == GIVEN || taken.kind == IS_GIVEN ? arguments[taken.index] : nullptr;
            Tensor tensor;
            py::object value = py::none();
            if (taken.kind == KEPT)
                tensor = results[taken.index];
            else if (taken.kind == GIVEN && THPVariable_Check(given.ptr()))
                tensor = THPVariable_Unpack(given.ptr());
            else if (taken.kind == GIVEN)
                value = py::reinterpret_borrow<py::object>(given);
            else if (taken.kind == IS_GIVEN)
                value = py::bool_(!given.is_none());
            else if (taken.kind == CONSTANT_ARGUMENT)
                value = taken.constant;
            is_tensor_.push_back(tensor.defined());
            saved_.emplace_back(tensor, taken.kind == KEPT && taken.index < (int)gradient_->differentiable);
            values_.push_back(std::move(value));
        }
        for (size_t i = 0; i < gradient_->gives.size(); ++i)
            if (THPVariable_Check(arguments[i])) gives_.push_back(gradient_->gives[i]);
    }

    variable_list apply(variable_list&& gradients) override {
        variable_list given(gives_.size());
        bool is_any = false;
        for (const Tensor& x : gradients) is_any = is_any || x.defined();
        if (!is_any) return given;
        variable_list tensors = taken_tensors(gradients);
        py::gil_scoped_acquire held;
        std::vector<py::object> arguments;
        std::vector<PyObject*> places;
        for (size_t i = 0; i < tensors.size(); ++i) {
            arguments.push_back(tensors[i].defined()
                                    ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[i]))
                                    : values_[i]);
            places.push_back(arguments.back().ptr());
        }
        PyObject* made = PyObject_Vectorcall(gradient_->call.ptr(), places.data(), places.size(), nullptr);
        if (!made) {
            python_error error;
            error.persist();
            throw std::move(error);
        }
        auto results = py::reinterpret_steal<py::object>(made);
        for (size_t i = 0; i < gives_.size(); ++i) {
            if (gives_[i] < 0) continue;
            PyObject* result = PyTuple_Check(made) ? PyTuple_GET_ITEM(made, gives_[i]) : made;
            given[i] = THPVariable_Unpack(result);
        }
        return given;
    }

  private:
    // The tensors among the arguments of the call, undefined where there is none. Hooks of saved tensors take the lock of
    // Python, so it is not held here.
    variable_list taken_tensors(const variable_list& gradients) {
        std::lock_guard<std::mutex> lock(mutex_);
        variable_list tensors(gradient_->takes.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
            const Taken& taken = gradient_->takes[i];
            if (taken.kind == GRAD) {
                tensors[i] = gradients[taken.index];
                if (!tensors[i].defined() && taken.constant.ptr() != Py_True)
                    tensors[i] = input_metadata(taken.index).zeros_like();
            } else if (is_tensor_[i]) {
                tensors[i] = taken.kind == KEPT ? saved_[i].unpack(pointer_to<torch::autograd::Node>(this))
                                                : saved_[i].unpack();
            }
        }
        return tensors;
    }

    std::shared_ptr<const Gradient> gradient_;
    std::vector<SavedVariable> saved_;  // for each argument of the call; empty if the argument is no tensor
    std::vector<bool> is_tensor_;
    std::vector<py::object> values_;
    std::vector<int> gives_;  // for each tensor among the arguments of the forward
};

// Records a new node as the history of the results; its next nodes are the history of `inputs`.
inline void record(const std::shared_ptr<const Gradient>& gradient, PyObject* const* arguments,
                   const variable_list& inputs, const c10::SmallVector<Tensor, 4>& results) {
    auto node = shared<GradientNode>(gradient);
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    for (size_t i = 0; i < gradient->differentiable; ++i) torch::autograd::set_history(results[i], node);
    node->keep(arguments, results);
}

}  // namespace tilewright
