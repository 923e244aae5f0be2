"""The retrieval server: BM25 over a corpus, behind one HTTP route."""
