"""Looking inside: the residual stream captured, attributed and edited, at every degree and in either layout."""

from tp.inspection.activation_cache import ActivationCache, CapturedTokens
from tp.inspection.attribution import Contributions, direct_contributions
from tp.inspection.capturing import capture
from tp.inspection.editing import Edit, add, edit, replace, scale, zero
from tp.inspection.gradients import GradientPaths, LayerGradientPaths, identity_and_sublayer_gradients
from tp.inspection.identity import IdentityError, residual_identity_error
from tp.inspection.lens import Lens, logit_lens
from tp.inspection.patching import patch
from tp.inspection.points import POINTS

__all__ = [
    "POINTS",
    "ActivationCache",
    "CapturedTokens",
    "Contributions",
    "Edit",
    "GradientPaths",
    "IdentityError",
    "LayerGradientPaths",
    "Lens",
    "add",
    "capture",
    "direct_contributions",
    "edit",
    "identity_and_sublayer_gradients",
    "logit_lens",
    "patch",
    "replace",
    "residual_identity_error",
    "scale",
    "zero",
]
