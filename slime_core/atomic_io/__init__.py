"""Files that are either whole or absent, and errors of a disk that refuses."""
