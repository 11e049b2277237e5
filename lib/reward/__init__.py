"""From responses to scores: scorers and their workers (pool.py), reward models, and their scores. Workers import this
package, so it imports no torch and no numpy."""
