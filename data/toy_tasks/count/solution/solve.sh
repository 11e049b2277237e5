cut -d ' ' -f 2 server.log | grep -c ERROR > errors.txt
