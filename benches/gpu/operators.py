"""The operators of `gpu`, in PyTorch, from the sizes that the other side gives."""

import torch
import torch.nn.functional as F


def operator_step(sizes, which, dtype, device):
    """A function that does the pass once: forward, backward to what it says, or both."""
    kind = sizes["operator"]
    alone = which in ("dgrad", "wgrad", "backward")
    of_input, of_weight = which in ("dgrad", "backward", "both"), which in ("wgrad", "backward", "both")
    leaves = []

    def given(shape, wanted, dtype=dtype):
        x = torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
        if wanted:
            leaves.append(x.requires_grad_())
        return x

    def images(batch, channels, size, wanted):
        layout = torch.contiguous_format if kind == "group_norm" else torch.channels_last
        x = torch.randn(batch, channels, size, size, device=device).to(dtype, memory_format=layout)
        if wanted:
            leaves.append(x.requires_grad_())
        return x

    def numbers(count, below):
        return torch.arange(count, device=device) * 7919 % below

    s = sizes
    if kind == "conv":
        x = images(s["batch"], s["channels"], s["size"], of_input)
        w = torch.randn(s["outs"], s["channels"], s["kernel"], s["kernel"], device=device)
        w = w.to(dtype, memory_format=torch.channels_last)
        if of_weight:
            leaves.append(w.requires_grad_())
        run = lambda: F.conv2d(x, w, padding=s["kernel"] // 2, stride=s["stride"])
    elif kind == "attention":
        q, k, v = (given((s["batch"], s["heads"], s["length"], s["width"]), of_input) for _ in range(3))
        run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif kind == "layer_norm":
        x, w, b = given((s["rows"], s["width"]), of_input), *(given((s["width"],), of_weight) for _ in range(2))
        run = lambda: F.layer_norm(x, w.shape, w, b, 1e-5)
    elif kind in ("batch_norm", "group_norm"):
        x = images(s["batch"], s["channels"], s["size"], of_input)
        w, b = (given((s["channels"],), of_weight, torch.float32) for _ in range(2))
        if kind == "batch_norm":
            mean, variance = torch.zeros(s["channels"], device=device), torch.ones(s["channels"], device=device)
            run = lambda: F.relu(F.batch_norm(x, mean, variance, w, b, training=True, eps=1e-5))
        else:
            # Under autocast PyTorch's group norm is F32.
            run = lambda: F.group_norm(x.float(), s["groups"], w, b, 1e-5)
    elif kind == "cross_entropy":
        x, y = given((s["rows"], s["classes"]), of_input), numbers(s["rows"], s["classes"])
        run = lambda: F.cross_entropy(x.float(), y)
    elif kind == "head":
        x, w = given((s["rows"], s["width"]), of_input), given((s["classes"], s["width"]), of_weight)
        y = numbers(s["rows"], s["classes"])
        run = lambda: F.cross_entropy(F.linear(x, w).float(), y)
    elif kind == "linear":
        x, w = given((s["rows"], s["ins"]), of_input), given((s["outs"], s["ins"]), of_weight)
        b = given((s["outs"],), of_weight)
        run = lambda: F.linear(x, w, b)
    elif kind == "embedding":
        table, ids = given((s["rows"], s["width"]), of_weight), numbers(s["numbers"], 1 if s["hot"] else s["rows"])
        run = lambda: F.embedding(ids, table)
    elif kind == "gelu":
        x = given((s["elements"],), of_input)
        run = lambda: F.gelu(x, approximate="tanh")
    elif kind == "softmax":
        x = given((s["rows"], s["width"]), of_input)
        # Under autocast PyTorch's softmax is F32.
        run = lambda: F.softmax(x.float(), 1)
    elif kind == "max_pool":
        x = images(s["batch"], s["channels"], s["size"], of_input)
        run = lambda: F.max_pool2d(x, 2)
    elif kind == "dropout":
        x = given((s["elements"],), of_input)
        run = lambda: F.dropout(x, 0.1)
    elif kind == "lstm":
        x = given((s["batch"], s["length"], s["width"]), of_input)
        lstm = torch.nn.LSTM(s["width"], s["width"], batch_first=True).to(device, dtype).requires_grad_(of_weight)
        leaves.extend(lstm.parameters() if of_weight else ())
        state = [given((1, s["batch"], s["width"]), False) for _ in range(2)]
        run = lambda: lstm(x, state)[0]
    elif kind == "cast":
        x = torch.randn(s["elements"], device=device)
        run = lambda: x.to(dtype)
    else:
        raise ValueError(f"no operator {kind}")

    with torch.no_grad():
        ones = torch.ones_like(run())

    # Not `y`, which `run` may read.
    output = run() if alone else None

    def step(_):
        if alone:
            torch.autograd.grad(output, leaves, ones, retain_graph=True)
        elif leaves:
            torch.autograd.grad(run(), leaves, ones)
        else:
            run()

    return step
