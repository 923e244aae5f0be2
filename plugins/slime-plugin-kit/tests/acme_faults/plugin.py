"""What the distribution registers."""

from acme_faults.advantages import *  # noqa: F403
from acme_faults.algorithms import *  # noqa: F403
from acme_faults.around import *  # noqa: F403
from acme_faults.drivers_of_setup import *  # noqa: F403
from acme_faults.episodes import *  # noqa: F403
from acme_faults.estimators import *  # noqa: F403
from acme_faults.losses import *  # noqa: F403
from acme_faults.media import *  # noqa: F403
from acme_faults.renderers import *  # noqa: F403
from acme_faults.rollouts import *  # noqa: F403
