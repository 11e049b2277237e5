[ "$(tr -d ' \n' < errors.txt)" = 15 ]
