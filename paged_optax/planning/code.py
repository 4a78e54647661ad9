"""The code of a way to train, to paste into a script."""


def written(way: str, inner: str, arguments: str = "", fused_head: bool = False) -> str:
    """The lines that train in a way.

    Args:
      way: Its name in the tables of `what_fits`.
      inner: The transformation, as code.
      arguments: What `paged` takes beside it.
      fused_head: Whether the loss takes `linear_cross_entropy`.

    Example:
      >>> print(written("paged", "optax.lion(1e-4)"))
      tx = po.paged(optax.lion(1e-4))
      state = tx.init(params)
      args = params, state, batch
      step = po.jit_step(step, *args, donate_argnums=(0, 1))
    """
    loss = ["# The loss ends with po.linear_cross_entropy(x, head, labels)."]
    lines = loss if fused_head else []
    if way == "resident":
        lines += [f"tx = {inner}", "state = tx.init(params)"]
        return "\n".join([*lines, "step = jax.jit(step, donate_argnums=(0, 1))"])
    lines += [f"tx = po.paged({', '.join(filter(None, [inner, arguments]))})"]
    if not way.startswith("layerwise"):
        lines += [
            "state = tx.init(params)",
            "args = params, state, batch",
            "step = po.jit_step(step, *args, donate_argnums=(0, 1))",
        ]
        return "\n".join(lines)
    where = ""
    if way.endswith("on host"):
        where = ', on_host="all"' if way.endswith("all on host") else ", on_host=True"
    lines += [
        "model = po.split_layers(loss, params, batch)",
        f"params = model.stack(params{where})",
        "state, workspace = tx.init(params), model.workspace(params)",
        "args = params, state, workspace, batch",
        "step = po.layerwise_step(model, tx)",
        "step = po.jit_step(step, *args, donate_argnums=(0, 1, 2))",
        "params, state, workspace, output = step(*args)",
    ]
    return "\n".join(lines)
