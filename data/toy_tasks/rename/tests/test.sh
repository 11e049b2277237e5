# passes with exit code 0
[ "$(ls | tr '\n' ' ')" = "a.jpg b.jpg c.jpg notes.txt " ] && grep -qx "picture b" b.jpg && grep -q jpeg notes.txt
