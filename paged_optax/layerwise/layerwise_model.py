import dataclasses
from paged_optax.layerwise.workspace import GradientWorkspace
@dataclasses.dataclass(frozen=True, eq=False)
class LayerwiseModel:
    prologue: object
    layer: object
    epilogue: object
    def workspace(self, params, **k):
        return GradientWorkspace.allocate(params["layers"], **k)
