sed -i 's/return \(.*\)/return max(0, \1)/' interval.py
