"""A commit URL in, an exported and checked workspace out."""
