"""From a call of `torch.compile` to graphs of ATen operators: Dynamo, AOTAutograd, programs kept on disk."""
