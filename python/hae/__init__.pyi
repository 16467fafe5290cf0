"""What type checkers are told: the public names, and where each lives."""

from hae import fates as fates
from hae import hf as hf
from hae import plots as plots
from hae import testing as testing
from hae._engine import ConfigError as ConfigError
from hae._engine import ContractViolation as ContractViolation
from hae._engine import NeedsError as NeedsError
from hae._engine import OutputError as OutputError
from hae._engine import Sequence as Sequence
from hae._engine import SequenceDetails as SequenceDetails
from hae._engine import SequenceInfo as SequenceInfo
from hae._engine import Trace as Trace
from hae._engine import TraceError as TraceError
from hae.comparison import Comparison as Comparison
from hae.comparison import Run as Run
from hae.comparison import compare as compare
from hae.comparison import policies as policies
from hae.comparison import policy as policy
from hae.comparison import replay as replay
from hae.comparison import stats as stats
from hae.policy_class import Decision as Decision
from hae.policy_class import Evict as Evict
from hae.policy_class import Limits as Limits
from hae.policy_class import Mark as Mark
from hae.policy_class import Merge as Merge
from hae.policy_class import Needs as Needs
from hae.policy_class import Policy as Policy
from hae.policy_class import PolicyRun as PolicyRun
from hae.result_folder import read_comparison as read_comparison
from hae.run_file import ResultError as ResultError
from hae.sequences import check as check
from hae.sequences import open as open
from hae.sequences import sequence as sequence
from hae.sequences import write as write
from hae.validation import Validation as Validation
from hae.validation import validate as validate

__version__: str
