import unittest

from interval import overlap


class Overlap(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(overlap((0, 10), (2, 5)), 3)

    def test_apart(self):
        self.assertEqual(overlap((0, 1), (3, 4)), 0)
