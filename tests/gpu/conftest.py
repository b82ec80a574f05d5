import sys
from pathlib import Path

# With import-mode=importlib pytest does not put a test folder on sys.path.
sys.path.append(str(Path(__file__).parent))
