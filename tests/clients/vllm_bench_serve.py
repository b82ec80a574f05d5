"""`vllm bench serve`.

vLLM's own command asks for the version of a package named vllm, and the CPU build has another name.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
